// Links between pipeline stages for Python: a mailbox in shared memory, and a connection.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <optional>
#include <string>

#include "bind/exchange.h"
#include "exchange/mailbox.h"
#include "exchange/socket_link.h"

namespace shardline {

PyObject* collective_aborted = nullptr;

namespace {

using namespace nanobind::literals;

class PyMailbox {
 public:
  PyMailbox(nb::handle buffer, std::optional<int> spin_iterations)
      : memory_(buffer, true),
        mailbox_(memory_.data(), static_cast<size_t>(memory_.size()), spin_iterations_for(spin_iterations, 2)) {}

  void send(nb::handle data, std::optional<double> timeout_s) {
    const Memory message(data, false);
    WaitStatus status;
    {
      nb::gil_scoped_release release;
      status = mailbox_.send(message.data(), message.size(), seconds(timeout_s), interrupted);
    }
    check(status, "send: the receiver made no room in time");
  }

  int64_t next_size(std::optional<double> timeout_s) {
    int64_t num_bytes = 0;
    WaitStatus status;
    {
      nb::gil_scoped_release release;
      status = mailbox_.peek(&num_bytes, seconds(timeout_s), interrupted);
    }
    check(status, "no message came in time");
    return num_bytes;
  }

  int64_t recv_into(nb::handle out_object, std::optional<double> timeout_s) {
    const Memory out(out_object, true);
    const int64_t num_bytes = next_size(timeout_s);
    if (num_bytes > out.size()) {
      raise(PyExc_ValueError,
            "the next message has " + std::to_string(num_bytes) + " bytes, the buffer " + std::to_string(out.size()));
    }
    receive(out.data(), num_bytes, timeout_s);
    return num_bytes;
  }

  nb::bytes recv(std::optional<double> timeout_s) {
    const int64_t num_bytes = next_size(timeout_s);
    nb::object message = nb::steal(PyBytes_FromStringAndSize(nullptr, num_bytes));
    if (!message.is_valid()) throw nb::python_error();
    receive(PyBytes_AS_STRING(message.ptr()), num_bytes, timeout_s);
    return nb::borrow<nb::bytes>(message);
  }

  void abort() { mailbox_.abort(); }
  bool ready() const { return mailbox_.ready(); }
  int64_t capacity() const { return mailbox_.capacity(); }

 private:
  void receive(void* out, int64_t num_bytes, std::optional<double> timeout_s) {
    WaitStatus status;
    {
      nb::gil_scoped_release release;
      status = mailbox_.receive(out, num_bytes, seconds(timeout_s), interrupted);
    }
    check(status, "recv: the sender stopped inside a message");
  }

  static void check(WaitStatus status, const char* timeout_message) {
    if (status == WaitStatus::kDone) return;
    if (status == WaitStatus::kInterrupted) throw nb::python_error();
    if (status == WaitStatus::kAborted) raise(collective_aborted, "the mailbox was aborted");
    raise(PyExc_TimeoutError, timeout_message);
  }

  Memory memory_;
  Mailbox mailbox_;
};

class PySocketLink {
 public:
  PySocketLink(int fd, std::string name, std::optional<int> spin_iterations)
      : link_(fd, std::move(name), socket_spin_iterations_for(spin_iterations)) {}

  void send(nb::handle data, std::optional<double> timeout_s) {
    const Memory message(data, false);
    WaitStatus status;
    {
      nb::gil_scoped_release release;
      status = link_.send(message.data(), message.size(), seconds(timeout_s), interrupted);
    }
    check(status, "did not take a message in time");
  }

  void recv_into(nb::handle out_object, std::optional<double> timeout_s) {
    const Memory out(out_object, true);
    WaitStatus status;
    {
      nb::gil_scoped_release release;
      status = link_.receive(out.data(), out.size(), seconds(timeout_s), interrupted);
    }
    check(status, "sent no message in time");
  }

  void abort() { link_.abort(); }

 private:
  void check(WaitStatus status, const char* timeout_message) const {
    if (status == WaitStatus::kDone) return;
    if (status == WaitStatus::kInterrupted) throw nb::python_error();
    if (status == WaitStatus::kAborted) raise(collective_aborted, "the link was aborted");
    raise(PyExc_TimeoutError, link_.name() + " " + timeout_message);
  }

  SocketLink link_;
};

}  // namespace

void bind_links(nb::module_& m) {
  collective_aborted = PyErr_NewException("shardline._cpu.CollectiveAborted", PyExc_RuntimeError, nullptr);
  m.attr("CollectiveAborted") = nb::borrow(collective_aborted);

  nb::class_<PyMailbox>(m, "Mailbox")
      .def(nb::init<nb::handle, std::optional<int>>(), "buffer"_a, "spin_iterations"_a.none() = nb::none())
      .def_static("required_bytes", &Mailbox::required_bytes, "capacity"_a)
      .def("send", &PyMailbox::send, "data"_a, "timeout_s"_a.none() = nb::none())
      .def("next_size", &PyMailbox::next_size, "timeout_s"_a.none() = nb::none())
      .def("recv_into", &PyMailbox::recv_into, "out"_a, "timeout_s"_a.none() = nb::none())
      .def("recv", &PyMailbox::recv, "timeout_s"_a.none() = nb::none())
      .def("abort", &PyMailbox::abort)
      .def("ready", &PyMailbox::ready)
      .def_prop_ro("capacity", &PyMailbox::capacity);

  nb::class_<PySocketLink>(m, "SocketLink")
      .def(nb::init<int, std::string, std::optional<int>>(), "fd"_a, "name"_a, "spin_iterations"_a.none() = nb::none())
      .def("send", &PySocketLink::send, "data"_a, "timeout_s"_a.none() = nb::none())
      .def("recv_into", &PySocketLink::recv_into, "out"_a, "timeout_s"_a.none() = nb::none())
      .def("abort", &PySocketLink::abort);
}

}  // namespace shardline
