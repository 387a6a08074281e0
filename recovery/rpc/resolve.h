#pragma once

#include <chrono>
#include <functional>
#include <vector>

#include "recovery/rpc/address.h"
#include "recovery/rpc/rpc.h"

// Resolves names to addresses within a deadline. getaddrinfo has no deadline and cannot be
// interrupted, so it runs on its own thread, which is left behind when it takes too long. Asio's
// resolver would make the end of the process wait for it.
namespace rekindle::rpc {

inline constexpr std::chrono::milliseconds kResolveDeadline{2000};

// May block for any time; runs on the thread that is left behind.
using LookUp = std::function<Result<std::vector<Endpoint>>(const HostPort& address)>;
// Calls getaddrinfo.
Result<std::vector<Endpoint>> system_look_up(const HostPort& address);

// kTimeout, kNotFound or kUnavailable; the message names the host.
async::Task<Result<std::vector<Endpoint>>> resolve(HostPort address, TimePoint deadline,
                                                   LookUp look_up = system_look_up);
// Blocks. For listen(), which runs before anything is served.
Result<std::vector<Endpoint>> resolve_blocking(const HostPort& address);

}  // namespace rekindle::rpc
