#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "src/base/clock.h"
#include "src/base/result.h"
#include "src/crypto/secret_memory.h"

namespace rekindle::rpc {

class Credentials;

// The tokens of readers that have no certificate, such as Prometheus. Control thread only.
class HttpTokens {
 public:
  // A file of mode 0600 with one or two tokens, each a line of 16 bytes or more. Returns nullptr
  // for an empty path.
  static Result<std::shared_ptr<HttpTokens>> open(const std::string& path);

  // Who has this token: "token:" and 8 digits, which tell nothing about it. Nothing: nobody. Reads
  // the file again, at most once a second. A file that cannot be used changes nothing.
  std::optional<std::string> principal_of(std::string_view token);

 private:
  explicit HttpTokens(std::string path) : path_(std::move(path)) {}

  const std::string path_;
  std::vector<crypto::Secret> tokens_;
  TimePoint next_look_{};
};

// How a daemon protects its HTTP servers.
struct HttpProtection {
  // nullptr, or without a certificate: they cannot answer over https.
  std::shared_ptr<Credentials> credentials;
  // nullptr: there are none.
  std::shared_ptr<HttpTokens> tokens;
  // Whoever reaches a server may read, by plain http too.
  bool open_to_all = false;
};

// Who may read from one HTTP server (docs/internals/security.md).
struct HttpAccess {
  // As above.
  bool is_open = true;
  // nullptr: no https.
  std::shared_ptr<Credentials> credentials = nullptr;
  std::shared_ptr<HttpTokens> tokens = nullptr;
  // Decides about a reader that has proven these names. Empty: any name will do.
  std::function<Result<void>(std::span<const std::string> principals)> allow = {};
};

// A loopback address is open, as `open_to_all` is. Any other needs a certificate. kDenied: there is
// none. `option` gave the address.
Result<HttpAccess> http_access(std::string_view option, const std::string& address,
                               const HttpProtection& protection);

}  // namespace rekindle::rpc
