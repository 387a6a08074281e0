#pragma once

#include <chrono>
#include <functional>
#include <vector>

#include "recovery/rpc/address.h"
#include "recovery/rpc/rpc.h"

// Names to addresses, bounded: getaddrinfo knows no deadline and cannot be interrupted, so it runs
// on a thread of its own that is left behind when it takes too long (Asio's resolver would make the
// end of the process wait for it).
namespace rekindle::rpc {

inline constexpr std::chrono::milliseconds kResolveDeadline{2000};

// May block for as long as it likes; runs on the thread that is left behind.
using LookUp = std::function<Result<std::vector<Endpoint>>(const HostPort& address)>;
Result<std::vector<Endpoint>> system_look_up(const HostPort& address);  // getaddrinfo

// kTimeout, kNotFound or kUnavailable, naming the host.
async::Task<Result<std::vector<Endpoint>>> resolve(HostPort address, TimePoint deadline,
                                                   LookUp look_up = system_look_up);
// For listen(), which runs before there is anything to serve.
Result<std::vector<Endpoint>> resolve_blocking(const HostPort& address);

}  // namespace rekindle::rpc
