#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "proto/frame.pb.h"
#include "recovery/rpc/rpc.h"

// The rules of the hello, without I/O (docs/reference/wire.md):
//   caller → hello            the server checks it, refuses or answers
//   server → hello, proof     the caller checks them
//   caller → proof            then calls may begin
// A proof is a signature by the key of the incarnation. In protocol 2 it is a MAC by the cluster
// secret, if both ends have one; the server's comes after the caller's.
namespace rekindle::rpc {

inline constexpr std::uint32_t kProtocolMin = 2;
inline constexpr std::uint32_t kProtocolMax = 3;
// From here on processes have keys.
inline constexpr std::uint32_t kProtocolOfKeys = 3;
inline constexpr std::size_t kNonceBytes = 32;

// The end of the connection that speaks. It is part of the MAC, so that a proof cannot be
// reflected.
enum class Side : std::uint8_t { kCaller = 'C', kServer = 'S' };

// `secret`: of a connection of protocol 2, "" for any other.
proto::Hello make_hello(const Identity& identity, std::string_view secret,
                        const std::optional<Incarnation>& expected);

// Checks the peer's hello: its shape, the protocol range, and that both sides have a secret or
// neither. kStale: the peer means another incarnation. Fills a Peer except for its address.
Result<Peer> check_hello(const proto::Hello& own, const proto::Hello& peer);
// kDenied: the connection is encrypted, so the peer has a release with keys, but its hello has
// none. Without a signature it could claim the incarnation of another process.
Result<void> check_signs(const proto::Hello& own, const proto::Hello& peer, bool encrypted);
// Whether both ends have a key, and sign.
bool both_sign(const proto::Hello& own, const proto::Hello& peer);
// Hands the epoch of the peer on. Only those who take part in the fleet tell one.
void tell_epoch(const Identity& own, const Peer& peer);
// The caller checks in addition that the answer comes from the incarnation that it meant.
Result<void> check_expected(const std::optional<Incarnation>& expected, const Peer& peer);

std::string make_proof(std::string_view secret, Side speaker, const proto::Hello& speaker_hello,
                       const proto::Hello& listener_hello);
// kDenied for a wrong secret.
Result<void> check_proof(const proto::HelloProof& proof, std::string_view secret, Side speaker,
                         const proto::Hello& speaker_hello, const proto::Hello& listener_hello);

// `channel`: of the TLS connection, "" without TLS.
std::string sign_hello(const crypto::SigningKey& key, Side speaker, std::string_view channel,
                       const proto::Hello& speaker_hello, const proto::Hello& listener_hello);
// kDenied: the speaker does not have the key of its hello, or speaks through a relay.
Result<void> check_signature(const proto::HelloProof& proof, Side speaker, std::string_view channel,
                             const proto::Hello& speaker_hello, const proto::Hello& listener_hello);

proto::Frame refusal_frame(const Error& error);
std::string_view role_name(proto::Role role);

}  // namespace rekindle::rpc
