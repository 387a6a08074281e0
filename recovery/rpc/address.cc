#include "recovery/rpc/address.h"

#include <algorithm>
#include <atomic>
#include <charconv>
#include <condition_variable>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <boost/asio/as_tuple.hpp>
#include <boost/asio/ip/address.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/local/stream_protocol.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/this_coro.hpp>
#include <boost/asio/use_awaitable.hpp>

#include "src/ipc/unix_socket.h"

namespace rekindle::rpc {

namespace asio = boost::asio;
using asio::ip::tcp;

namespace {

constexpr std::size_t kMaxHostBytes = 253;
constexpr std::size_t kMaxLocalHosts = 64;

Failure malformed(std::string_view text) {
  return fail(ErrorCode::kInvalid,
              "'{}' is not an address; write HOST:PORT, 10.0.0.3:7400 or [fd00::3]:7400",
              text.substr(0, kMaxHostBytes));
}

}  // namespace

Result<HostPort> HostPort::parse(std::string_view text) {
  const auto colon = text.rfind(':');
  if (colon == std::string_view::npos || colon == 0) return malformed(text);
  std::string_view host = text.substr(0, colon);
  const std::string_view digits = text.substr(colon + 1);
  HostPort result;
  const auto [end, error] =
      std::from_chars(digits.data(), digits.data() + digits.size(), result.port);
  if (digits.empty() || error != std::errc() || end != digits.data() + digits.size()) {
    return malformed(text);
  }
  if (host.front() == '[') {
    if (host.size() < 3 || host.back() != ']') return malformed(text);
    host = host.substr(1, host.size() - 2);
  } else if (host.find(':') != std::string_view::npos) {
    return malformed(text);
  }
  if (host.size() > kMaxHostBytes || host.find_first_of(" \t\n[]") != std::string_view::npos) {
    return malformed(text);
  }
  result.host = host;
  return result;
}

std::string HostPort::to_string() const {
  return host.find(':') == std::string::npos ? fmt::format("{}:{}", host, port)
                                             : fmt::format("[{}]:{}", host, port);
}

Result<std::vector<std::string>> parse_addresses(std::string_view text) {
  std::vector<std::string> addresses;
  while (true) {
    const auto comma = text.find(',');
    TRY(const HostPort address, HostPort::parse(text.substr(0, comma)));
    addresses.push_back(address.to_string());
    if (comma == std::string_view::npos) return addresses;
    text.remove_prefix(comma + 1);
  }
}

std::string to_string(const Endpoint& endpoint) {
  tcp::endpoint inet;
  if (endpoint.size() == 0 || endpoint.size() > inet.capacity()) return "unknown";
  std::memcpy(inet.data(), endpoint.data(), endpoint.size());
  inet.resize(endpoint.size());
  asio::ip::address address = inet.address();
  if (address.is_v6() && address.to_v6().is_v4_mapped()) {
    address = asio::ip::make_address_v4(asio::ip::v4_mapped, address.to_v6());
  }
  return HostPort{address.to_string(), inet.port()}.to_string();
}

std::vector<std::string> local_hosts() {
  ifaddrs* list = nullptr;
  if (::getifaddrs(&list) != 0) return {};
  const std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> owner(list, &::freeifaddrs);
  std::vector<std::string> hosts;
  for (const ifaddrs* one = list; one != nullptr; one = one->ifa_next) {
    if (one->ifa_addr == nullptr || hosts.size() == kMaxLocalHosts) continue;
    char text[INET6_ADDRSTRLEN] = "";
    if (one->ifa_addr->sa_family == AF_INET) {
      const auto* v4 = reinterpret_cast<const sockaddr_in*>(one->ifa_addr);
      ::inet_ntop(AF_INET, &v4->sin_addr, text, sizeof text);
    } else if (one->ifa_addr->sa_family == AF_INET6) {
      const auto* v6 = reinterpret_cast<const sockaddr_in6*>(one->ifa_addr);
      ::inet_ntop(AF_INET6, &v6->sin6_addr, text, sizeof text);
    }
    if (*text != '\0') hosts.emplace_back(text);
  }
  return hosts;
}

std::vector<Endpoint> numeric_endpoints(const HostPort& address) {
  boost::system::error_code error;
  const auto parsed = asio::ip::make_address(address.host, error);
  if (error) return {};
  return {Endpoint(tcp::endpoint(parsed, address.port))};
}

Result<Endpoint> unix_endpoint(const std::string& path) {
  TRY_VOID(ipc::unix_address(path));
  return Endpoint(boost::asio::local::stream_protocol::endpoint(path));
}

Result<UniqueFd> listen_unix_socket(const std::string& path) {
  return ipc::listen_unix_socket(path);
}

Result<void> check_unix_path(const std::string& path) { return ipc::check_unix_path(path); }

Result<void> check_peer_uid(int socket_fd, const std::string& path) {
  TRY(const ipc::Peer peer, ipc::peer_of(socket_fd));
  return ipc::check_peer(peer, {}, "unix socket " + path);
}

using std::chrono::steady_clock;

namespace {

constexpr int kMaxLookups = 16;
// The threads of this process that are inside getaddrinfo.
std::atomic<int> g_lookups{0};

// The lookup thread and its waiter share it; the last one frees it.
struct Lookup {
  std::mutex mutex;
  // For resolve_blocking().
  std::condition_variable done;
  // Guarded by `mutex`.
  std::optional<Result<std::vector<Endpoint>>> result;
  // Guarded by `mutex`; empty once the waiter has gone.
  std::function<void()> notify;
};

Failure lookup_failed(const std::string& host, int code, int error_number) {
  if (code == EAI_SYSTEM) return fail_errno(error_number, fmt::format("resolve '{}'", host));
  const bool no_such_name = code == EAI_NONAME || code == EAI_NODATA;
  return fail(no_such_name ? ErrorCode::kNotFound : ErrorCode::kUnavailable,
              "resolve '{}': {}; check the name, or use an IP address", host, gai_strerror(code));
}

Result<void> start_lookup(const HostPort& address, const LookUp& look_up,
                          const std::shared_ptr<Lookup>& lookup) {
  if (g_lookups.fetch_add(1) >= kMaxLookups) {
    g_lookups.fetch_sub(1);
    return fail(ErrorCode::kUnavailable,
                "resolve '{}': {} earlier lookups have not ended; is the name server reachable?",
                address.host, kMaxLookups);
  }
  try {
    std::thread([address, look_up, lookup] {
      auto result = look_up(address);
      g_lookups.fetch_sub(1);
      const std::lock_guard lock(lookup->mutex);
      lookup->result = std::move(result);
      lookup->done.notify_all();
      if (lookup->notify) lookup->notify();
    }).detach();
  } catch (const std::system_error&) {
    g_lookups.fetch_sub(1);
    return fail(ErrorCode::kExhausted, "resolve '{}': cannot start a thread", address.host);
  }
  return {};
}

Failure timed_out(const HostPort& address) {
  return fail(ErrorCode::kTimeout,
              "resolve '{}': no answer from the name server in time; check the name, or use an IP "
              "address",
              address.host);
}

}  // namespace

Result<std::vector<Endpoint>> system_look_up(const HostPort& address) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* list = nullptr;
  const int code =
      ::getaddrinfo(address.host.c_str(), std::to_string(address.port).c_str(), &hints, &list);
  if (code != 0) return lookup_failed(address.host, code, errno);
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> owner(list, ::freeaddrinfo);
  std::vector<Endpoint> endpoints;
  for (const addrinfo* entry = list; entry != nullptr; entry = entry->ai_next) {
    if (entry->ai_family != AF_INET && entry->ai_family != AF_INET6) continue;
    endpoints.emplace_back(entry->ai_addr, entry->ai_addrlen, IPPROTO_TCP);
  }
  if (endpoints.empty()) return lookup_failed(address.host, EAI_NODATA, 0);
  return endpoints;
}

async::Task<Result<std::vector<Endpoint>>> resolve(HostPort address, TimePoint deadline,
                                                   LookUp look_up) {
  if (auto numeric = numeric_endpoints(address); !numeric.empty()) co_return numeric;
  const auto lookup = std::make_shared<Lookup>();
  const auto executor = co_await asio::this_coro::executor;
  const auto timer = std::make_shared<asio::steady_timer>(
      executor, std::min(deadline, steady_clock::now() + kResolveDeadline));
  // While notify is set this coroutine, and so the executor's context, is alive.
  lookup->notify = [executor, timer] { asio::post(executor, [timer] { timer->cancel(); }); };
  struct Abandon {
    std::shared_ptr<Lookup> lookup;
    ~Abandon() {
      const std::lock_guard lock(lookup->mutex);
      lookup->notify = {};
    }
  } abandon{lookup};
  CO_TRY_VOID(start_lookup(address, look_up, lookup));
  for (;;) {
    {
      const std::lock_guard lock(lookup->mutex);
      if (lookup->result) co_return std::move(*lookup->result);
    }
    const auto [error] = co_await timer->async_wait(asio::as_tuple(asio::use_awaitable));
    if (!error) co_return timed_out(address);
  }
}

Result<std::vector<Endpoint>> resolve_blocking(const HostPort& address) {
  if (auto numeric = numeric_endpoints(address); !numeric.empty()) return numeric;
  const auto lookup = std::make_shared<Lookup>();
  TRY_VOID(start_lookup(address, system_look_up, lookup));
  std::unique_lock lock(lookup->mutex);
  if (!lookup->done.wait_for(lock, kResolveDeadline, [&] { return lookup->result.has_value(); })) {
    return timed_out(address);
  }
  return std::move(*lookup->result);
}

}  // namespace rekindle::rpc
