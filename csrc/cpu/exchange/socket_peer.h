// The connection to one other rank: frames in order, in both directions at once. A frame has a header with its number
// and its length, so ranks that have diverged are noticed and never read each other's bytes as tensors.
#pragma once

#include <atomic>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "exchange/group.h"
#include "runtime/wait.h"

namespace shardline {

// The other rank, or the network to it, is gone. The message names the rank.
struct PeerLost : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class SocketPeer {
 public:
  // Takes over a connected TCP socket. Errors call the peer `name`.
  SocketPeer(int fd, std::string name);
  ~SocketPeer();
  SocketPeer(const SocketPeer&) = delete;

  // A frame to send from memory, and a frame to receive into the places that `part` describes in `out`. The memory must
  // stay valid until the frame is over. One frame at a time in each direction.
  void start_send(uint64_t number, const void* data, int64_t num_bytes);
  void start_receive(uint64_t number, const GatherPart& part, void* out);

  // Moves what can be moved without waiting; false: nothing could be moved. Throws PeerLost if the peer is gone, and
  // std::runtime_error if it sent another frame than was awaited.
  bool advance();
  // Throws PeerLost if the peer has ended after its last frame, while this rank waits for others.
  void check_open() const;
  bool is_sending() const { return sent_ < to_send_; }
  bool is_receiving() const { return received_ < to_receive_; }
  bool is_busy() const { return is_sending() || is_receiving(); }

  void shut_down();  // any thread may call this; both ends notice it at once
  int fd() const { return fd_; }
  const std::string& name() const { return name_; }

 private:
  struct Header {
    uint64_t number;
    int64_t num_bytes;
  };
  static constexpr int64_t kHeaderBytes = sizeof(Header);

  bool send_some();
  bool receive_some();
  void check_header() const;
  [[noreturn]] void lose(int error) const;

  const int fd_;
  const std::string name_;
  Header out_header_ = {}, in_header_ = {}, expected_ = {};
  const char* from_ = nullptr;
  char* to_ = nullptr;
  GatherPart part_ = {};
  int64_t sent_ = 0, to_send_ = 0, received_ = 0, to_receive_ = 0;  // bytes, headers included
};

// Sends and receives the frames of all peers. It spins for a while, then sleeps until a socket is ready. Stops early if
// `aborted` is not zero.
WaitStatus finish_frames(const std::vector<SocketPeer*>& peers, const std::atomic<uint32_t>& aborted,
                         const WaitLimits& limits);

}  // namespace shardline
