#include "transport/session_hello.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <string>
#include <utility>

#include <poll.h>

#include "src/crypto/bound_text.h"
#include "src/crypto/hmac.h"

namespace rekindle::transport {
namespace {

template <typename Bytes>
std::string_view text_of(const Bytes& bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

}  // namespace

SessionHandle handle_of(const SessionToken& token) {
  const std::string mac = crypto::hmac_sha256(text_of(token.bytes), "rekindle session handle v1");
  SessionHandle handle;
  std::memcpy(handle.bytes.data(), mac.data(), handle.bytes.size());
  return handle;
}

HelloExchange::Nonce HelloExchange::fresh_nonce() {
  Nonce nonce;
  fill_random(nonce.data(), nonce.size());
  return nonce;
}

HelloExchange::Proof HelloExchange::prove(const SessionToken& token, Side side) const {
  crypto::BoundText text("rekindle data stream v2");
  text.bytes(side == Side::kReader ? "reader" : "source").bytes(text_of(incarnation.bytes));
  text.bytes(text_of(reader_nonce)).bytes(text_of(source_nonce));
  const std::string mac = crypto::hmac_sha256(text_of(token.bytes), std::move(text).take());
  Proof proof;
  std::memcpy(proof.data(), mac.data(), proof.size());
  return proof;
}

bool HelloExchange::proves(const SessionToken& token, Side side, const Proof& proof) const {
  return crypto::equal_constant_time(text_of(proof), text_of(prove(token, side)));
}

Result<void> check_hello(const HelloAnswer& answer, const HelloProtocol& protocol,
                         const PathTarget& target) {
  switch (answer.status) {
    case HelloStatus::kOk:
      break;
    case HelloStatus::kDenied:
      return fail(ErrorCode::kDenied, "the session is not known there: ask for a new grant");
    case HelloStatus::kVersion:
      return fail(ErrorCode::kInvalid, "the peer speaks {} protocol {}, this side {}",
                  protocol.name, answer.version, protocol.version);
    case HelloStatus::kBusy:
      return fail(ErrorCode::kUnavailable, "{}", protocol.busy);
    case HelloStatus::kNotEncrypted:
      return fail(ErrorCode::kDenied, "the source demands encryption (--require-encryption)");
    case HelloStatus::kStale:
    default:
      return fail(ErrorCode::kStale, "another incarnation serves there: look the source up again");
  }
  if (answer.incarnation != target.incarnation) {
    return fail(ErrorCode::kStale, "another incarnation answered: look the source up again");
  }
  return {};
}

Result<void> wait_ready(int fd, short events, TimePoint deadline, std::string_view what) {
  constexpr std::int64_t kLongestPollMs = 60'000;
  while (true) {
    const Duration left = deadline - std::chrono::steady_clock::now();
    const std::int64_t ms = std::chrono::ceil<std::chrono::milliseconds>(left).count();
    pollfd entry{fd, events, 0};
    const int rc =
        ::poll(&entry, 1, static_cast<int>(std::clamp<std::int64_t>(ms, 0, kLongestPollMs)));
    if (rc > 0) return {};
    if (rc == 0 && ms <= kLongestPollMs) return fail(ErrorCode::kTimeout, "{} in time", what);
    if (rc < 0 && errno != EINTR) return fail_errno(errno, "poll");
  }
}

}  // namespace rekindle::transport
