#include "recovery/rpc/resolve.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>

#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <boost/asio/as_tuple.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/this_coro.hpp>
#include <boost/asio/use_awaitable.hpp>

namespace rekindle::rpc {

namespace asio = boost::asio;
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
