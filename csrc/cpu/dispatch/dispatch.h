#pragma once

#include <string>
#include <vector>

namespace shardline {

std::vector<std::string> available_isas();  // best last
void set_isa(const std::string& name);

}  // namespace shardline
