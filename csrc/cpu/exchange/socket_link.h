// Messages from one sender to one receiver over TCP, in order. The receiver knows the length of each message.
#pragma once

#include <string>

#include "exchange/socket_peer.h"

namespace shardline {

class SocketLink {
 public:
  // Takes over a connected TCP socket. Errors call the other end `name`.
  SocketLink(int fd, std::string name, int spin_iterations) : peer_(fd, std::move(name)), spin_(spin_iterations) {}

  // Returns once the operating system has taken the whole message.
  WaitStatus send(const void* data, int64_t num_bytes, double timeout_s, bool (*interrupted)()) {
    peer_.start_send(++number_, data, num_bytes);
    return finish(timeout_s, interrupted);
  }
  WaitStatus receive(void* out, int64_t num_bytes, double timeout_s, bool (*interrupted)()) {
    peer_.start_receive(++number_, {1, num_bytes, 0, 0}, out);
    return finish(timeout_s, interrupted);
  }

  void abort() {
    aborted_.store(1);
    peer_.shut_down();
  }
  const std::string& name() const { return peer_.name(); }

 private:
  WaitStatus finish(double timeout_s, bool (*interrupted)()) {
    WaitStatus status = WaitStatus::kAborted;
    try {
      status = finish_frames({&peer_}, aborted_, {deadline_after(timeout_s), &spin_, interrupted});
    } catch (const std::runtime_error&) {
      if (aborted_.load() == 0) {
        abort();
        throw;
      }
    }
    // A wait that ends inside a message leaves a part of the message on its way, so nobody may use the link any more.
    if (status != WaitStatus::kDone) abort();
    return status;
  }

  SocketPeer peer_;
  Spin spin_;
  uint64_t number_ = 0;  // messages so far
  std::atomic<uint32_t> aborted_{0};
};

}  // namespace shardline
