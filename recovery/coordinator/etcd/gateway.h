#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json.hpp>

#include "recovery/coordinator/coordinator.h"
#include "recovery/rpc/address.h"
#include "recovery/rpc/http_client.h"
#include "src/base/result.h"

namespace rekindle::coordinator::etcd {

// Where etcd is, and how it lets us in.
struct Access {
  std::vector<rpc::HostPort> members;
  // nullopt: plain HTTP.
  std::optional<rpc::HttpTlsFiles> tls;
  // "": without.
  std::string user;
  std::string password_file;
};
// Parses "https://10.0.0.1:2379,https://10.0.0.2:2379". Without a scheme it is http.
Result<Access> parse_endpoints(std::string_view urls);
// Reads the files that the options name, to check them. The error names the option.
Result<Access> access_of(const EtcdOptions& options);

// Keys and values in JSON are base64.
std::string to_base64(std::string_view bytes);
Result<std::string> from_base64(std::string_view text);

// etcd writes 64-bit numbers as strings and leaves zeros out.
std::int64_t number_in(const nlohmann::json& object, const char* field);

// Calls of etcd's v3 API through its JSON gateway
// (https://etcd.io/docs/v3.4/dev-guide/api_grpc_gateway). It keeps a connection to each member that
// it has asked; when one does not answer it asks the next one. Blocks, at most until the deadline.
// One thread. A call may reach etcd twice when a connection breaks.
class Gateway {
 public:
  explicit Gateway(Access access);

  // kUnavailable: no member answered, each named with its cause. kInvalid: etcd refuses the call.
  // kDenied: it refuses the user or the password.
  Result<nlohmann::json> call(std::string_view path, const nlohmann::json& body,
                              std::chrono::milliseconds deadline);

 private:
  Result<nlohmann::json> ask(rpc::HttpClient& member, std::string_view path,
                             const std::string& body, TimePoint deadline);
  Result<void> log_in(rpc::HttpClient& member, TimePoint deadline);

  const Access access_;
  // Of the user, until etcd refuses it. All members take it.
  std::string token_;
  std::deque<rpc::HttpClient> members_;
  std::size_t current_ = 0;
};

}  // namespace rekindle::coordinator::etcd
