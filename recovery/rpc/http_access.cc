#include "recovery/rpc/http_access.h"

#include <utility>

#include "recovery/rpc/credentials.h"
#include "src/base/log.h"
#include "src/crypto/hmac.h"

namespace rekindle::rpc {

namespace {

constexpr std::chrono::seconds kTokensKept{1};

bool same_token(std::string_view a, std::string_view b) {
  constexpr std::string_view kPurpose = "rekindle http token v1";
  return crypto::equal_constant_time(crypto::hmac_sha256(a, kPurpose),
                                     crypto::hmac_sha256(b, kPurpose));
}

}  // namespace

Result<std::shared_ptr<HttpTokens>> HttpTokens::open(const std::string& path) {
  if (path.empty()) return std::shared_ptr<HttpTokens>();
  std::shared_ptr<HttpTokens> tokens(new HttpTokens(path));
  auto read = read_secrets(path);
  if (!read) return fail(std::move(read).error().with_context("--http-token-file"));
  tokens->tokens_ = std::move(*read);
  tokens->next_look_ = steady_now() + kTokensKept;
  return tokens;
}

std::optional<std::string> HttpTokens::principal_of(std::string_view token) {
  if (steady_now() >= next_look_) {
    next_look_ = steady_now() + kTokensKept;
    if (auto read = read_secrets(path_)) {
      tokens_ = std::move(*read);
    } else {
      log::error("http.tokens_refused", "why", read.error(), "effect", "the old ones stay in use");
    }
  }
  for (const crypto::Secret& known : tokens_) {
    if (same_token(known.reveal(), token)) return "token:" + SharedKey(known.reveal()).id;
  }
  return std::nullopt;
}

Result<HttpAccess> http_access(std::string_view option, const std::string& address,
                               const HttpProtection& protection) {
  HttpAccess access;
  auto local = is_loopback_address(address);
  if (!local) return fail(std::move(local).error().with_context(option));
  access.is_open = *local || protection.open_to_all;
  const auto& credentials = protection.credentials;
  if (credentials != nullptr && credentials->context()->has_certificate) {
    access.credentials = credentials;
    access.tokens = protection.tokens;
    return access;
  }
  if (access.is_open) return access;
  return fail(
      ErrorCode::kDenied,
      "{} {}: any host may reach this address, and there is no certificate for https: give "
      "--tls-cert, --tls-key and --tls-ca; or a loopback address; or let whoever reaches it "
      "read, with --http-open",
      option, address);
}

}  // namespace rekindle::rpc
