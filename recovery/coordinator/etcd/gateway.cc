#include "recovery/coordinator/etcd/gateway.h"

#include <algorithm>
#include <charconv>
#include <limits>

#include <openssl/evp.h>

#include "recovery/rpc/credentials.h"
#include "src/base/clock.h"

namespace rekindle::coordinator::etcd {

namespace {

constexpr std::string_view kPlain = "http://";
constexpr std::string_view kTls = "https://";
constexpr std::size_t kMaxAnswerBytes = 8u << 20;  // etcd's own limit for a request is 1.5 MiB

// etcd's words when a token has ended, is of another life of etcd, or is older than a change of
// its users.
bool token_is_refused(const rpc::HttpReply& answer) {
  return answer.status == 401 || answer.body.find("invalid auth token") != std::string::npos ||
         answer.body.find("revision of auth store is old") != std::string::npos;
}

// The messages of etcd's gateway may end with a new line.
std::string_view one_line(std::string_view body) {
  return body.substr(0, body.find_last_not_of(" \r\n") + 1);
}

// 5xx: this member fails, another may not. 4xx: the call itself is wrong.
Result<nlohmann::json> answer_in(const rpc::HttpReply& answer) {
  if (answer.status == 401 || answer.status == 403 ||
      answer.body.find("user name is empty") != std::string::npos) {
    return fail(ErrorCode::kDenied, "HTTP {}: {}; see --etcd-user and --etcd-password-file",
                answer.status, one_line(answer.body));
  }
  if (answer.status >= 400) {
    return fail(answer.status >= 500 ? ErrorCode::kUnavailable : ErrorCode::kInvalid, "HTTP {}: {}",
                answer.status, one_line(answer.body));
  }
  auto parsed = nlohmann::json::parse(answer.body, nullptr, false);
  if (!parsed.is_object()) {
    return fail(ErrorCode::kUnavailable, "it does not speak etcd's JSON: {:.80}", answer.body);
  }
  return parsed;
}

}  // namespace

Result<Access> parse_endpoints(std::string_view urls) {
  Access access;
  while (true) {
    const std::size_t comma = urls.find(',');
    std::string_view url = urls.substr(0, comma);
    const bool tls = url.starts_with(kTls);
    if (!access.members.empty() && tls != access.tls.has_value()) {
      return fail(ErrorCode::kInvalid, "{}: use https:// for all members, or for none", url);
    }
    if (tls) access.tls.emplace();
    if (tls || url.starts_with(kPlain)) url.remove_prefix((tls ? kTls : kPlain).size());
    if (url.ends_with('/')) url.remove_suffix(1);
    TRY(auto member, rpc::HostPort::parse(url));
    access.members.push_back(std::move(member));
    if (comma == std::string_view::npos) return access;
    urls.remove_prefix(comma + 1);
  }
}

Result<Access> access_of(const EtcdOptions& options) {
  TRY(Access access, parse_endpoints(options.urls));
  const bool files =
      !options.authorities.empty() || !options.certificate.empty() || !options.key.empty();
  if (files && !access.tls) {
    return fail(ErrorCode::kInvalid,
                "--etcd-ca, --etcd-cert and --etcd-key need addresses with https://");
  }
  if (options.certificate.empty() != options.key.empty()) {
    return fail(ErrorCode::kInvalid,
                "--etcd-cert and --etcd-key belong together; both may name one file");
  }
  if (access.tls) {
    access.tls = {options.authorities, options.certificate, options.key};
    auto right = rpc::check_tls_files(*access.tls);
    if (!right) {
      return fail(std::move(right).error().with_context("--etcd-ca, --etcd-cert, --etcd-key"));
    }
  }
  if (options.user.empty() != options.password_file.empty()) {
    return fail(ErrorCode::kInvalid, "--etcd-user and --etcd-password-file belong together");
  }
  access.user = options.user;
  access.password_file = options.password_file;
  auto password = rpc::read_secret(options.password_file);
  if (!password) return fail(std::move(password).error().with_context("--etcd-password-file"));
  auto key = rpc::read_secret(options.state_key_file);
  if (!key) return fail(std::move(key).error().with_context("--etcd-state-key"));
  if (options.adopt_unsigned && options.state_key_file.empty()) {
    return fail(ErrorCode::kInvalid, "--etcd-adopt-unsigned needs --etcd-state-key");
  }
  return access;
}

std::string to_base64(std::string_view bytes) {
  std::string text((bytes.size() + 2) / 3 * 4 + 1, '\0');  // EVP_EncodeBlock ends it with a 0.
  const int size = EVP_EncodeBlock(reinterpret_cast<unsigned char*>(text.data()),
                                   reinterpret_cast<const unsigned char*>(bytes.data()),
                                   static_cast<int>(bytes.size()));
  text.resize(static_cast<std::size_t>(size));
  return text;
}

Result<std::string> from_base64(std::string_view text) {
  std::string bytes(text.size() / 4 * 3, '\0');
  const bool fits = text.size() % 4 == 0 && text.size() < std::numeric_limits<int>::max();
  if (!fits || EVP_DecodeBlock(reinterpret_cast<unsigned char*>(bytes.data()),
                               reinterpret_cast<const unsigned char*>(text.data()),
                               static_cast<int>(text.size())) < 0) {
    return fail(ErrorCode::kCorrupt, "etcd answered with something that is not base64");
  }
  const auto padding =
      std::count(text.end() - std::min<std::ptrdiff_t>(2, std::ssize(text)), text.end(), '=');
  bytes.resize(bytes.size() - static_cast<std::size_t>(padding));
  return bytes;
}

std::int64_t number_in(const nlohmann::json& object, const char* field) {
  const auto found = object.find(field);
  if (found == object.end()) return 0;
  if (found->is_number_integer()) return found->get<std::int64_t>();
  if (!found->is_string()) return 0;
  const auto& text = found->get_ref<const std::string&>();
  std::int64_t value = 0;
  std::from_chars(text.data(), text.data() + text.size(), value);
  return value;
}

Gateway::Gateway(Access access) : access_(std::move(access)) {
  for (const auto& member : access_.members) {
    members_.emplace_back(member, kMaxAnswerBytes, access_.tls);
  }
}

namespace {

// The JSON library would keep copies of the password.
crypto::SecretBytes log_in_text(const std::string& user, const crypto::Secret& password) {
  crypto::SecretBytes text;
  const auto add = [&text](std::string_view more) {
    text.insert(text.end(), more.begin(), more.end());
  };
  add(fmt::format(R"({{"name":{},"password":")", nlohmann::json(user).dump()));
  for (const char c : password.reveal()) {
    if (static_cast<unsigned char>(c) < 0x20) {
      add(fmt::format("\\u{:04x}", c));
      continue;
    }
    if (c == '"' || c == '\\') text.push_back('\\');
    text.push_back(c);
  }
  add("\"}");
  return text;
}

}  // namespace

Result<void> Gateway::log_in(rpc::HttpClient& member, TimePoint deadline) {
  TRY(const crypto::Secret password, rpc::read_secret(access_.password_file));
  const crypto::SecretBytes who = log_in_text(access_.user, password);
  TRY(const auto reply, member.post("/v3/auth/authenticate", {who.data(), who.size()}, deadline));
  auto answer = answer_in(reply);
  // etcd answers 400 to a wrong password.
  if (!answer && answer.error().code() != ErrorCode::kUnavailable) {
    return fail(ErrorCode::kDenied, "etcd refuses the user {}: {}", access_.user,
                answer.error().message());
  }
  if (!answer) return fail(std::move(answer).error());
  token_ = answer->value("token", "");
  if (token_.empty()) return fail(ErrorCode::kUnavailable, "it gives no token");
  return {};
}

Result<nlohmann::json> Gateway::ask(rpc::HttpClient& member, std::string_view path,
                                    const std::string& body, TimePoint deadline) {
  const bool fresh = token_.empty();
  if (!access_.user.empty() && fresh) TRY_VOID(log_in(member, deadline));
  auto reply = member.post(path, body, deadline, token_);
  if (reply && !access_.user.empty() && !fresh && token_is_refused(*reply)) {
    TRY_VOID(log_in(member, deadline));
    reply = member.post(path, body, deadline, token_);
  }
  if (!reply) return fail(std::move(reply).error());
  // The next call logs in again.
  if (token_is_refused(*reply)) token_.clear();
  return answer_in(*reply);
}

Result<nlohmann::json> Gateway::call(std::string_view path, const nlohmann::json& body,
                                     std::chrono::milliseconds deadline) {
  const auto give_up = steady_now() + deadline;
  const std::string text = body.dump();
  std::string causes;
  for (std::size_t asked = 0; asked < members_.size(); ++asked) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(give_up - steady_now());
    const auto share = left / static_cast<std::int64_t>(members_.size() - asked);
    rpc::HttpClient& member = members_[current_];
    auto answer = ask(member, path, text, steady_now() + share);
    if (answer) return answer;
    if (answer.error().code() != ErrorCode::kUnavailable) {
      return fail(std::move(answer).error().with_context("etcd refuses " + std::string(path)));
    }
    causes += fmt::format("{}{}: {}", causes.empty() ? "" : "; ", member.server().to_string(),
                          answer.error().message());
    current_ = (current_ + 1) % members_.size();
  }
  return fail(ErrorCode::kUnavailable, "etcd does not answer ({})", causes);
}

}  // namespace rekindle::coordinator::etcd
