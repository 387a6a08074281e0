#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "proto/frame.pb.h"
#include "recovery/rpc/rpc.h"

// The rules of the hello, without I/O (docs/reference/wire.md):
//   caller → hello            the server checks it, refuses or answers
//   server → hello            the caller checks it
//   caller → proof            only when both have a cluster secret
//   server → proof            then calls may begin
namespace rekindle::rpc {

inline constexpr std::uint32_t kProtocolMin = 2;
inline constexpr std::uint32_t kProtocolMax = 2;
inline constexpr std::size_t kNonceBytes = 32;

// The end of the connection that speaks. It is part of the MAC, so that a proof cannot be
// reflected.
enum class Side : std::uint8_t { kCaller = 'C', kServer = 'S' };

// secret: "" where the socket itself proves who is there (unix, same uid).
proto::Hello make_hello(const Identity& identity, std::string_view secret,
                        const std::optional<Incarnation>& expected);

// Checks the peer's hello: its shape, the protocol range, and that both sides have a secret or
// neither. kStale: the peer means another incarnation. Fills a Peer except for its address.
Result<Peer> check_hello(const proto::Hello& own, const proto::Hello& peer);
// The caller checks in addition that the answer comes from the incarnation that it meant.
Result<void> check_expected(const std::optional<Incarnation>& expected, const Peer& peer);

std::string make_proof(std::string_view secret, Side speaker, const proto::Hello& speaker_hello,
                       const proto::Hello& listener_hello);
// kDenied for a wrong secret.
Result<void> check_proof(const proto::HelloProof& proof, std::string_view secret, Side speaker,
                         const proto::Hello& speaker_hello, const proto::Hello& listener_hello);

proto::Frame refusal_frame(const Error& error);
std::string_view role_name(proto::Role role);

}  // namespace rekindle::rpc
