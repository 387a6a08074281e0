#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

#include "src/base/clock.h"
#include "src/base/ids.h"
#include "src/base/result.h"
#include "src/base/unique_fd.h"
#include "transport/read_op.h"
#include "transport/session_hello.h"

// The side channel of the shm transport: small messages of fixed size over a unix SOCK_SEQPACKET
// socket, one per packet. Both ends are on the same machine and have its byte order.
namespace rekindle::transport::shm {

inline constexpr std::uint32_t kProtocolVersion = 1;
inline constexpr std::uint64_t kMagic = 0x314d'4853'4b45'52;  // "REKSHM1"

struct ClientHello {
  std::uint64_t magic = kMagic;
  std::uint32_t version = kProtocolVersion;
  std::uint32_t reserved = 0;
  SessionToken token;
  Incarnation incarnation;
};

// With kOk comes the descriptor of the registry's change counter, if there is one.
struct ServerHello {
  std::uint64_t magic = kMagic;
  std::uint32_t version = kProtocolVersion;
  HelloStatus status = HelloStatus::kOk;
  Incarnation incarnation;
};

struct RegionRequest {
  std::uint64_t magic = kMagic;
  RegionKey key;
  std::uint32_t want_fd = 0;  // 0: only ask whether the key is still good
  std::uint32_t reserved = 0;
};

// With kOk and want_fd comes a read-only descriptor of the file.
struct RegionReply {
  std::uint64_t magic = kMagic;
  RegionKey key;
  std::uint32_t status = 0;  // OpStatus
  std::uint32_t reserved = 0;
  std::uint64_t size_bytes = 0;
  std::uint64_t fd_offset = 0;  // of the region's first byte in the file
};

// A packet and at most one descriptor. These never block. kAgain: there is no packet, or no room.
enum class Io { kDone, kAgain, kClosed };
Io send_packet(int socket, std::span<const std::byte> packet, int fd = -1);
// kClosed also for a packet of another size: the peer does not speak this protocol.
Io receive_packet(int socket, std::span<std::byte> packet, UniqueFd& fd);

template <typename Message>
Io send_message(int socket, const Message& message, int fd = -1) {
  static_assert(std::is_trivially_copyable_v<Message>);
  return send_packet(socket, std::as_bytes(std::span(&message, 1)), fd);
}
template <typename Message>
Io receive_message(int socket, Message& message, UniqueFd& fd) {
  static_assert(std::is_trivially_copyable_v<Message>);
  const Io io = receive_packet(socket, std::as_writable_bytes(std::span(&message, 1)), fd);
  return io == Io::kDone && message.magic != kMagic ? Io::kClosed : io;
}

// Whether the process at the other end runs as this uid (or as root).
bool peer_is_trusted(int socket);

}  // namespace rekindle::transport::shm
