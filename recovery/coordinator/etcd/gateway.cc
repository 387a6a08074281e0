#include "recovery/coordinator/etcd/gateway.h"

#include <algorithm>
#include <charconv>
#include <limits>

#include <openssl/evp.h>

#include "src/base/clock.h"

namespace rekindle::coordinator::etcd {

namespace {

constexpr std::string_view kScheme = "http://";
constexpr std::size_t kMaxAnswerBytes = 8u << 20;  // etcd's own limit for a request is 1.5 MiB

}  // namespace

Result<std::vector<rpc::HostPort>> parse_endpoints(std::string_view urls) {
  std::vector<rpc::HostPort> endpoints;
  while (true) {
    const std::size_t comma = urls.find(',');
    std::string_view url = urls.substr(0, comma);
    if (url.starts_with("https://")) {
      return fail(ErrorCode::kInvalid, "{}: etcd over TLS is not supported yet; use http://", url);
    }
    if (url.starts_with(kScheme)) url.remove_prefix(kScheme.size());
    if (url.ends_with('/')) url.remove_suffix(1);
    TRY(auto endpoint, rpc::HostPort::parse(url));
    endpoints.push_back(std::move(endpoint));
    if (comma == std::string_view::npos) return endpoints;
    urls.remove_prefix(comma + 1);
  }
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

Gateway::Gateway(std::vector<rpc::HostPort> endpoints) {
  for (auto& endpoint : endpoints) members_.emplace_back(std::move(endpoint), kMaxAnswerBytes);
}

// 5xx: this member fails, another may not. 4xx: the call itself is wrong.
Result<nlohmann::json> Gateway::ask(rpc::HttpClient& member, std::string_view path,
                                    const std::string& body, TimePoint deadline) {
  TRY(const auto answer, member.post(path, body, deadline));
  if (answer.status >= 400) {
    return fail(answer.status >= 500 ? ErrorCode::kUnavailable : ErrorCode::kInvalid, "HTTP {}: {}",
                answer.status, answer.body);
  }
  auto parsed = nlohmann::json::parse(answer.body, nullptr, false);
  if (!parsed.is_object()) {
    return fail(ErrorCode::kUnavailable, "it does not speak etcd's JSON: {:.80}", answer.body);
  }
  return parsed;
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
    if (answer.error().code() == ErrorCode::kInvalid) {
      return fail(std::move(answer).error().with_context("etcd refuses " + std::string(path)));
    }
    causes += fmt::format("{}{}: {}", causes.empty() ? "" : "; ", member.server().to_string(),
                          answer.error().message());
    current_ = (current_ + 1) % members_.size();
  }
  return fail(ErrorCode::kUnavailable, "etcd does not answer ({})", causes);
}

}  // namespace rekindle::coordinator::etcd
