#pragma once

#include <array>
#include <cstdint>
#include <string_view>

#include "src/base/clock.h"
#include "src/base/ids.h"
#include "src/base/result.h"
#include "transport/path.h"

// The first exchange on a connection of the tcp and shm transports. The client names its session
// and the incarnation that it means to reach. The server admits it, or says why not.
namespace rekindle::transport {

enum class HelloStatus : std::uint32_t {
  kOk = 0,
  // Unknown or revoked session.
  kDenied = 1,
  // Another incarnation lives here.
  kStale = 2,
  // The server speaks another version only.
  kVersion = 3,
  // Too many connections.
  kBusy = 4,
  // The server demands encryption.
  kNotEncrypted = 5,
};

// Names a session on a stream that anybody may read. It is derived from the token, and nobody can
// derive the token from it.
using SessionHandle = Id128<struct SessionHandleTag>;
SessionHandle handle_of(const SessionToken& token);

// Each end shows that it knows the token, and neither end sends it.
struct HelloExchange {
  using Nonce = std::array<std::uint8_t, 32>;
  using Proof = std::array<std::uint8_t, 32>;
  enum class Side { kReader, kSource };

  static Nonce fresh_nonce();
  Proof prove(const SessionToken& token, Side side) const;
  bool proves(const SessionToken& token, Side side, const Proof& proof) const;

  // Of the source.
  Incarnation incarnation;
  Nonce reader_nonce{};
  Nonce source_nonce{};
};

// The name of a transport's protocol in messages.
struct HelloProtocol {
  std::string_view name;
  std::uint32_t version = 0;
  std::string_view busy;  // the meaning of kBusy
};

struct HelloAnswer {
  HelloStatus status = HelloStatus::kOk;
  std::uint32_t version = 0;
  Incarnation incarnation;
};

// The client's verdict on the answer: kDenied, kStale, kInvalid (versions differ) or kUnavailable
// (busy).
Result<void> check_hello(const HelloAnswer& answer, const HelloProtocol& protocol,
                         const PathTarget& target);

// Waits until `fd` is ready. kTimeout at the deadline: `what` tells which event did not come.
Result<void> wait_ready(int fd, short events, TimePoint deadline, std::string_view what);

}  // namespace rekindle::transport
