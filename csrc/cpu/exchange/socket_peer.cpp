#include "exchange/socket_peer.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace shardline {
namespace {

constexpr size_t kStagingBytes = 256 << 10;
#ifndef POLLRDHUP
#define POLLRDHUP 0
#endif
#ifdef MSG_NOSIGNAL
constexpr int kSendFlags = MSG_DONTWAIT | MSG_NOSIGNAL;
#else
constexpr int kSendFlags = MSG_DONTWAIT;
#endif

// Bytes that arrive in one piece but belong in several places pass through here.
char* staging() {
  thread_local std::vector<char> bytes(kStagingBytes);
  return bytes.data();
}

bool would_wait(int error) { return error == EAGAIN || error == EWOULDBLOCK || error == EINTR; }

}  // namespace

SocketPeer::SocketPeer(int fd, std::string name) : fd_(fd), name_(std::move(name)) {
  const int enabled = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &enabled, sizeof enabled);
#ifdef SO_NOSIGPIPE
  setsockopt(fd, SOL_SOCKET, SO_NOSIGPIPE, &enabled, sizeof enabled);
#endif
  const int flags = fcntl(fd, F_GETFL, 0);
  if (flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) < 0) {
    throw std::invalid_argument("the connection to " + name_ + " is no open socket");
  }
}

SocketPeer::~SocketPeer() { close(fd_); }

void SocketPeer::shut_down() { shutdown(fd_, SHUT_RDWR); }

// An end with bytes that it had not read resets the connection as it closes.
void SocketPeer::lose(int error) const {
  const bool is_closed = error == ECONNRESET || error == EPIPE;
  throw PeerLost(name_ + (is_closed ? " closed its connection"
                                    : " cannot be reached any more: " + std::string(std::strerror(error))));
}

void SocketPeer::start_send(uint64_t number, const void* data, int64_t num_bytes) {
  out_header_ = {number, num_bytes};
  from_ = static_cast<const char*>(data);
  sent_ = 0;
  to_send_ = kHeaderBytes + num_bytes;
}

void SocketPeer::start_receive(uint64_t number, const GatherPart& part, void* out) {
  expected_ = {number, part.total_bytes()};
  part_ = part;
  to_ = static_cast<char*>(out);
  received_ = 0;
  to_receive_ = kHeaderBytes + part.total_bytes();
}

void SocketPeer::check_header() const {
  if (in_header_.number == expected_.number && in_header_.num_bytes == expected_.num_bytes) return;
  throw std::runtime_error(name_ + " sent exchange " + std::to_string(in_header_.number) + " with " +
                           std::to_string(in_header_.num_bytes) + " bytes where exchange " +
                           std::to_string(expected_.number) + " with " + std::to_string(expected_.num_bytes) +
                           " bytes was expected: the ranks have diverged");
}

bool SocketPeer::send_some() {
  if (!is_sending()) return false;
  const int64_t done = std::max<int64_t>(0, sent_ - kHeaderBytes), left = to_send_ - kHeaderBytes - done;
  iovec pieces[2];
  int count = 0;
  if (sent_ < kHeaderBytes) {
    pieces[count++] = {reinterpret_cast<char*>(&out_header_) + sent_, static_cast<size_t>(kHeaderBytes - sent_)};
  }
  if (left > 0) pieces[count++] = {const_cast<char*>(from_) + done, static_cast<size_t>(left)};
  msghdr message = {};
  message.msg_iov = pieces;
  message.msg_iovlen = static_cast<decltype(message.msg_iovlen)>(count);
  const ssize_t moved = sendmsg(fd_, &message, kSendFlags);
  if (moved < 0) {
    if (would_wait(errno)) return false;
    lose(errno);
  }
  sent_ += moved;
  return true;
}

bool SocketPeer::receive_some() {
  if (!is_receiving()) return false;
  const bool in_place = part_.rows <= 1 || part_.row_bytes == part_.stride_bytes;
  const int64_t before = std::max<int64_t>(0, received_ - kHeaderBytes), left = to_receive_ - kHeaderBytes - before;
  iovec pieces[2];
  int count = 0;
  if (received_ < kHeaderBytes) {
    pieces[count++] = {reinterpret_cast<char*>(&in_header_) + received_, static_cast<size_t>(kHeaderBytes - received_)};
  }
  if (left > 0 && in_place) pieces[count++] = {to_ + part_.offset_bytes + before, static_cast<size_t>(left)};
  if (left > 0 && !in_place) pieces[count++] = {staging(), std::min(kStagingBytes, static_cast<size_t>(left))};
  msghdr message = {};
  message.msg_iov = pieces;
  message.msg_iovlen = static_cast<decltype(message.msg_iovlen)>(count);
  const ssize_t moved = recvmsg(fd_, &message, MSG_DONTWAIT);
  if (moved == 0) lose(ECONNRESET);
  if (moved < 0) {
    if (would_wait(errno)) return false;
    lose(errno);
  }
  const bool had_header = received_ >= kHeaderBytes;
  received_ += moved;
  if (!had_header && received_ >= kHeaderBytes) check_header();
  if (!in_place && received_ - kHeaderBytes > before) scatter(staging(), before, received_ - kHeaderBytes, part_, to_);
  return true;
}

void SocketPeer::check_open() const {
  pollfd socket = {fd_, POLLRDHUP, 0};
  if (!is_busy() && poll(&socket, 1, 0) > 0 && (socket.revents & (POLLRDHUP | POLLHUP | POLLERR)) != 0) {
    lose(ECONNRESET);
  }
}

bool SocketPeer::advance() {
  const bool sent = send_some();
  return receive_some() || sent;
}

WaitStatus finish_frames(const std::vector<SocketPeer*>& peers, const std::atomic<uint32_t>& aborted,
                         const WaitLimits& limits) {
  constexpr int kSliceMs = 100;
  std::vector<pollfd> sockets;
  for (int idle = 0;; ++idle) {
    bool moved = false, busy = false;
    for (SocketPeer* peer : peers) {
      if (peer->is_busy()) moved |= peer->advance();
      busy |= peer->is_busy();
    }
    if (!busy) return WaitStatus::kDone;
    if (aborted.load(std::memory_order_relaxed) != 0) return WaitStatus::kAborted;
    if (moved) idle = 0;
    if (moved || idle < limits.spin->now) {
      cpu_pause();
      continue;
    }
    const int64_t began_ns = monotonic_ns();
    if (began_ns >= limits.deadline_ns) return WaitStatus::kTimeout;
    sockets.clear();
    for (const SocketPeer* peer : peers) {
      const int events = (peer->is_sending() ? POLLOUT : 0) | (peer->is_receiving() ? POLLIN : 0);
      if (events != 0) sockets.push_back({peer->fd(), static_cast<short>(events), 0});
    }
    const int64_t left_ms = (limits.deadline_ns - began_ns) / 1000000 + 1;
    const int ready = poll(sockets.data(), static_cast<nfds_t>(sockets.size()),
                           static_cast<int>(std::min<int64_t>(kSliceMs, left_ms)));
    limits.spin->learn(monotonic_ns() - began_ns);
    if (ready <= 0) {
      if (limits.interrupted()) return WaitStatus::kInterrupted;
      for (SocketPeer* peer : peers) peer->check_open();
    }
    idle = 0;
  }
}

}  // namespace shardline
