#include "recovery/rpc/handshake.h"

#include <algorithm>

#include "recovery/rpc/convert.h"
#include "recovery/rpc/credentials.h"
#include "src/base/protocol_range.h"
#include "src/base/version.h"
#include "src/crypto/bound_text.h"
#include "src/crypto/hmac.h"

namespace rekindle::rpc {

namespace {

constexpr std::size_t kMaxNodeIdBytes = 255;

Result<void> check_shape(const proto::Hello& hello) {
  if (hello.nonce().size() != kNonceBytes) {
    return fail(ErrorCode::kInvalid, "the hello has a nonce of {} bytes instead of {}",
                hello.nonce().size(), kNonceBytes);
  }
  if (hello.node_id().size() > kMaxNodeIdBytes ||
      std::any_of(hello.node_id().begin(), hello.node_id().end(),
                  [](char c) { return c <= 0x20 || c == 0x7f; })) {
    return fail(ErrorCode::kInvalid,
                "the hello's node id is not 0 to {} printable ASCII characters without spaces",
                kMaxNodeIdBytes);
  }
  if (hello.protocol_min() == 0 || hello.protocol_min() > hello.protocol_max()) {
    return fail(ErrorCode::kInvalid, "the hello's protocol range {}..{} is empty",
                hello.protocol_min(), hello.protocol_max());
  }
  return {};
}

std::string describe(const proto::Hello& hello) {
  const std::string role(role_name(hello.role()));
  const bool named = !hello.node_id().empty() && hello.node_id() != role;
  return named ? fmt::format("{} {}", role, hello.node_id()) : role;
}

ProtocolRange range_of(const proto::Hello& hello) {
  return {fmt::format("{} ({})", describe(hello), hello.software().substr(0, 64)),
          hello.protocol_min(), hello.protocol_max()};
}

Result<void> check_protocol(const proto::Hello& own, const proto::Hello& peer) {
  const auto conflict = protocol_conflict(range_of(own), range_of(peer));
  return conflict ? fail(ErrorCode::kDenied, "{}", *conflict) : Result<void>();
}

Result<void> check_secrets(const proto::Hello& own, const proto::Hello& peer) {
  if (own.authenticated() == peer.authenticated()) return {};
  const proto::Hello& without = own.authenticated() ? peer : own;
  const proto::Hello& with = own.authenticated() ? own : peer;
  return fail(ErrorCode::kDenied,
              "{} has a cluster secret and {} has none; start both with the same --secret-file",
              describe(with), describe(without));
}

// An incarnation belongs to a key. Only protocol 2 has incarnations without one.
Result<void> check_key(const proto::Hello& own, const proto::Hello& peer) {
  if (!both_sign(own, peer)) return {};
  if (peer.public_key().size() != crypto::kPublicKeyBytes) {
    return fail(ErrorCode::kInvalid, "the hello has a key of {} bytes instead of {}",
                peer.public_key().size(), crypto::kPublicKeyBytes);
  }
  if (peer.incarnation() == incarnation_of(peer.public_key()).to_bytes()) return {};
  return fail(ErrorCode::kDenied, "{} claims an incarnation that is not of its key",
              describe(peer));
}

// Everything that a hello says, so that no relay can change it.
void add_hello(crypto::BoundText& text, const proto::Hello& hello) {
  text.bytes(hello.nonce()).bytes(hello.public_key());
  text.u64(static_cast<std::uint64_t>(hello.role())).bytes(hello.node_id());
  text.bytes(hello.incarnation()).bytes(hello.expected_incarnation());
  text.u64(hello.epoch()).u64(hello.protocol_min()).u64(hello.protocol_max());
  text.bytes(hello.software()).u64(hello.authenticated() ? 1 : 0);
}

std::string signed_text(Side speaker, std::string_view channel, const proto::Hello& speaker_hello,
                        const proto::Hello& listener_hello) {
  crypto::BoundText text("rekindle hello v3");
  text.u64(static_cast<std::uint64_t>(speaker)).bytes(channel);
  add_hello(text, speaker_hello);
  add_hello(text, listener_hello);
  return std::move(text).take();
}

}  // namespace

std::string_view role_name(proto::Role role) {
  switch (role) {
    case proto::ROLE_COORDINATOR:
      return "coordinator";
    case proto::ROLE_AGENT:
      return "agent";
    case proto::ROLE_PULLER:
      return "puller";
    case proto::ROLE_CLIENT:
      return "client";
    default:
      return "unknown role";
  }
}

proto::Hello make_hello(const Identity& identity, std::string_view secret,
                        const std::optional<Incarnation>& expected) {
  proto::Hello hello;
  hello.set_protocol_min(kProtocolMin);
  // A hello of protocol 2 has no key.
  const bool signs = identity.key != nullptr && secret.empty();
  hello.set_protocol_max(signs ? kProtocolMax : kProtocolOfKeys - 1);
  if (signs) hello.set_public_key(identity.key->public_key());
  hello.set_role(identity.role);
  hello.set_node_id(identity.node_id);
  hello.set_incarnation(identity.incarnation.to_bytes());
  hello.set_epoch(identity.epoch ? identity.epoch() : 0);
  std::string nonce(kNonceBytes, '\0');
  fill_random(nonce.data(), nonce.size());
  hello.set_nonce(std::move(nonce));
  hello.set_software(std::string(software_version()));
  if (expected) hello.set_expected_incarnation(expected->to_bytes());
  hello.set_authenticated(!secret.empty());
  return hello;
}

Result<Peer> check_hello(const proto::Hello& own, const proto::Hello& peer) {
  TRY_VOID(check_shape(peer));
  TRY_VOID(check_protocol(own, peer));
  TRY_VOID(check_secrets(own, peer));
  TRY(const auto incarnation, Incarnation::from_bytes(peer.incarnation()));
  TRY_VOID(check_key(own, peer));
  if (!peer.expected_incarnation().empty() && peer.expected_incarnation() != own.incarnation()) {
    return fail(ErrorCode::kStale,
                "{} has restarted since it was looked up (another incarnation answers); look it "
                "up again",
                describe(own));
  }
  Peer result;
  result.role = peer.role();
  result.node_id = peer.node_id();
  result.incarnation = incarnation;
  result.epoch = peer.epoch();
  if (both_sign(own, peer)) result.public_key = peer.public_key();
  return result;
}

void tell_epoch(const Identity& own, const Peer& peer) {
  const bool member = peer.role == proto::ROLE_AGENT || peer.role == proto::ROLE_COORDINATOR;
  if (member && own.heard_epoch) own.heard_epoch(peer.epoch);
}

Result<void> check_signs(const proto::Hello& own, const proto::Hello& peer, bool encrypted) {
  if (!encrypted || both_sign(own, peer)) return {};
  return fail(
      ErrorCode::kDenied,
      "{} speaks protocol {} inside TLS, which proves no incarnation: protocol {} is needed",
      describe(peer), peer.protocol_max(), kProtocolOfKeys);
}

bool both_sign(const proto::Hello& own, const proto::Hello& peer) {
  return std::min(own.protocol_max(), peer.protocol_max()) >= kProtocolOfKeys;
}

Result<void> check_expected(const std::optional<Incarnation>& expected, const Peer& peer) {
  if (!expected || *expected == peer.incarnation) return {};
  return fail(ErrorCode::kStale,
              "another incarnation answers than the one that was looked up; look it up again");
}

std::string make_proof(std::string_view secret, Side speaker, const proto::Hello& speaker_hello,
                       const proto::Hello& listener_hello) {
  crypto::BoundText text("rekindle hello v1");
  text.u64(static_cast<std::uint64_t>(speaker));
  text.bytes(speaker_hello.nonce()).bytes(listener_hello.nonce());
  text.u64(static_cast<std::uint64_t>(speaker_hello.role())).bytes(speaker_hello.node_id());
  text.bytes(speaker_hello.incarnation()).bytes(speaker_hello.expected_incarnation());
  text.u64(speaker_hello.epoch());
  text.u64(speaker_hello.protocol_min()).u64(speaker_hello.protocol_max());
  return crypto::hmac_sha256(secret, std::move(text).take());
}

Result<void> check_proof(const proto::HelloProof& proof, std::string_view secret, Side speaker,
                         const proto::Hello& speaker_hello, const proto::Hello& listener_hello) {
  if (crypto::equal_constant_time(proof.mac(),
                                  make_proof(secret, speaker, speaker_hello, listener_hello))) {
    return {};
  }
  return fail(ErrorCode::kDenied,
              "{} and {} have different cluster secrets; give both the same --secret-file",
              describe(speaker_hello), describe(listener_hello));
}

std::string sign_hello(const crypto::SigningKey& key, Side speaker, std::string_view channel,
                       const proto::Hello& speaker_hello, const proto::Hello& listener_hello) {
  return key.sign(signed_text(speaker, channel, speaker_hello, listener_hello));
}

Result<void> check_signature(const proto::HelloProof& proof, Side speaker, std::string_view channel,
                             const proto::Hello& speaker_hello,
                             const proto::Hello& listener_hello) {
  if (crypto::verify(speaker_hello.public_key(),
                     signed_text(speaker, channel, speaker_hello, listener_hello),
                     proof.signature())) {
    return {};
  }
  return fail(ErrorCode::kDenied,
              "{} has not signed its hello with the key of its incarnation, or a relay stands "
              "between both ends",
              describe(speaker_hello));
}

Identity make_identity(proto::Role role, std::string node_id,
                       std::shared_ptr<Credentials> credentials) {
  Identity identity;
  identity.role = role;
  identity.node_id = std::move(node_id);
  identity.key = std::make_shared<const crypto::SigningKey>(crypto::SigningKey::generate());
  identity.incarnation = incarnation_of(identity.key->public_key());
  if (credentials != nullptr) identity.secret = credentials->secret();
  identity.credentials = std::move(credentials);
  return identity;
}

Incarnation incarnation_of(std::string_view public_key) {
  const std::string digest = crypto::hmac_sha256("rekindle incarnation v1", public_key);
  return *Incarnation::from_bytes(std::string_view(digest).substr(0, 16));
}

proto::Frame refusal_frame(const Error& error) {
  proto::Frame frame;
  *frame.mutable_proof()->mutable_refusal() = to_status(error);
  return frame;
}

}  // namespace rekindle::rpc
