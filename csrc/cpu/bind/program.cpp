// Activation tensors from the thread's arena, and programs of recorded kernel calls, for Python.
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "bind/bind.h"
#include "bind/dlpack.h"
#include "bind/tensor.h"
#include "runtime/arena.h"
#include "runtime/program.h"

namespace shardline {
namespace {

using namespace nanobind::literals;

struct DTypeEntry {
  const char* name;
  DType dtype;
  DLDataType dl;
};

constexpr DTypeEntry kDTypes[] = {
    {"bfloat16", DType::kBFloat16, {kDLBfloat, 16, 1}},
    {"float32", DType::kFloat32, {kDLFloat, 32, 1}},
    {"int8", DType::kInt8, {kDLInt, 8, 1}},
    {"int32", DType::kInt32, {kDLInt, 32, 1}},
    {"int64", DType::kInt64, {kDLInt, 64, 1}},
    {"uint8", DType::kUInt8, {kDLUInt, 8, 1}},
    {"float64", DType::kFloat64, {kDLFloat, 64, 1}},
};
constexpr int kNumDTypes = sizeof kDTypes / sizeof kDTypes[0];

const DTypeEntry& entry_of(nb::handle torch_dtype) {
  static PyObject* known[kNumDTypes] = {};  // torch's dtypes are never freed
  if (known[0] == nullptr) {
    const nb::object torch = nb::module_::import_("torch");
    for (int i = 0; i < kNumDTypes; ++i) known[i] = torch.attr(kDTypes[i].name).ptr();
  }
  for (int i = 0; i < kNumDTypes; ++i) {
    if (torch_dtype.ptr() == known[i]) return kDTypes[i];
  }
  raise_type_error("activations cannot have the dtype " + std::string(nb::str(torch_dtype).c_str()));
}

const DLPackExchangeApi& torch_api() {
  // Not a static local: threads would wait for its first one with the GIL, which that one may give away meanwhile.
  static std::atomic<const DLPackExchangeApi*> found = nullptr;
  const DLPackExchangeApi* api = found.load();
  if (api == nullptr) {
    const nb::object type = nb::module_::import_("torch").attr("Tensor");
    api = exchange_api(reinterpret_cast<PyTypeObject*>(type.ptr()));
    found.store(api);
  }
  if (api == nullptr || api->managed_tensor_to_py_object == nullptr) {
    raise_type_error("this torch has no DLPack exchange table");
  }
  return *api;
}

size_t num_bytes_of(const std::vector<int64_t>& shape, const DTypeEntry& entry) {
  size_t bytes = element_size(entry.dtype);
  for (int64_t size : shape) bytes *= static_cast<size_t>(size);
  return bytes;
}

// A block of the arena that torch owns. Torch gives it back with the tensor's last user.
struct ArenaTensor {
  DLManagedTensor managed = {};
  std::shared_ptr<Arena> arena;
  size_t num_bytes;
  std::vector<int64_t> shape, strides;

  static void release(DLManagedTensor* managed) {
    auto* self = static_cast<ArenaTensor*>(managed->owner);
    self->arena->give_back(self->managed.tensor.data, self->num_bytes);
    delete self;
  }
};

nb::object tensor_over(const std::shared_ptr<Arena>& arena, void* block, const std::vector<int64_t>& shape,
                       const DTypeEntry& entry) {
  auto* owner = new ArenaTensor{{}, arena, num_bytes_of(shape, entry), shape, std::vector<int64_t>(shape.size())};
  int64_t stride = 1;
  for (size_t dim = shape.size(); dim-- > 0;) {
    owner->strides[dim] = stride;
    stride *= shape[dim];
  }
  owner->managed.major = 1;
  owner->managed.owner = owner;
  owner->managed.deleter = &ArenaTensor::release;
  owner->managed.tensor = {
      block, {kDLCpu, 0}, static_cast<int32_t>(shape.size()), entry.dl, owner->shape.data(), owner->strides.data(), 0};
  void* object = nullptr;
  if (torch_api().managed_tensor_to_py_object(&owner->managed, &object) != 0) {
    ArenaTensor::release(&owner->managed);
    throw nb::python_error();
  }
  return nb::steal(static_cast<PyObject*>(object));
}

nb::object activation_empty(nb::handle dtype, nb::args sizes) {
  const DTypeEntry& entry = entry_of(dtype);
  std::vector<int64_t> shape;
  for (nb::handle size : sizes) {
    shape.push_back(nb::cast<int64_t>(size));
    if (shape.back() < 0) raise_value_error("sizes must not be negative");
  }
  const std::shared_ptr<Arena>& arena = Arena::of_this_thread();
  return tensor_over(arena, arena->take(num_bytes_of(shape, entry)), shape, entry);
}

// A program, and the tensor that it computes.
class PyProgram {
 public:
  void begin() {
    if (Program::recording() != nullptr) raise_value_error("this thread is already recording a program");
    program_.begin();
  }

  void end() { program_.end(); }

  void set_output(nb::handle object) {
    const Tensor output(object, "output");
    output.is_contiguous();
    output_ = output.data();
    shape_.assign(output.shape(), output.shape() + output.rank());
    for (const DTypeEntry& entry : kDTypes) {
      if (entry.dtype == output.dtype()) entry_ = &entry;
    }
    if (entry_ == nullptr) raise_type_error("no program can compute this dtype");
  }

  nb::object replay() const {
    if (entry_ == nullptr) raise_value_error("set_output must be called before replay");
    bool done;
    {
      nb::gil_scoped_release release;
      done = program_.replay();
    }
    if (!done || !arena_->take_at(output_, num_bytes_of(shape_, *entry_))) return nb::none();
    return tensor_over(arena_, output_, shape_, *entry_);
  }

 private:
  Program program_;
  std::shared_ptr<Arena> arena_ = Arena::of_this_thread();
  void* output_ = nullptr;
  std::vector<int64_t> shape_;
  const DTypeEntry* entry_ = nullptr;
};

}  // namespace

void bind_program(nb::module_& m) {
  m.def("activation_empty", &activation_empty, "dtype"_a, "sizes"_a);
  m.def("activation_bytes", [] { return Arena::of_this_thread()->used_bytes(); });
  nb::class_<PyProgram>(m, "Program")
      .def(nb::init<>())
      .def("begin", &PyProgram::begin)
      .def("end", &PyProgram::end)
      .def("set_output", &PyProgram::set_output, "output"_a)
      .def("replay", &PyProgram::replay);
}

}  // namespace shardline
