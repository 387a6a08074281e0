#include <cstddef>
#include <cstdint>
#include <string_view>

#include "tests/fuzz/fuzz_check.h"
#include "transport/verbs/link/rail_pairs.h"
#include "transport/verbs/link/verbs_wire.h"

// What a peer says in an offer or a handshake. What parses must say the same again, and must be fit
// for what is made of it.
namespace {

using namespace rekindle::transport::verbs;

template <typename Message>
void round_trip(const Message& message) {
  const std::string bytes = message.to_bytes();
  const auto again = Message::parse(bytes);
  FUZZ_CHECK(again.has_value());
  FUZZ_CHECK(again->to_bytes() == bytes);
}

void check(const Endpoint& endpoint) {
  FUZZ_CHECK(endpoint.rails.size() <= kMaxRails);
  round_trip(endpoint);
  const auto pairs = choose_rail_pairs(endpoint.rails, endpoint.rails);
  FUZZ_CHECK(pairs.has_value() == !endpoint.rails.empty());
}

// Without links it only asks which rails there are.
void check(const ConnectRequest& request) {
  FUZZ_CHECK(request.links.size() <= kMaxRails);
  for (const auto& link : request.links) {
    FUZZ_CHECK(!link.queue_pairs.empty() && link.queue_pairs.size() <= kMaxQueuePairs);
    FUZZ_CHECK(link.rd_atomic >= 1);
  }
  round_trip(request);
}

// Whatever windows say, bytes that are found in them have an address.
void check(const ConnectResponse& response) {
  for (const auto& link : response.links) {
    FUZZ_CHECK(link.queue_pairs.size() <= kMaxQueuePairs);
    const auto windows =
        RemoteWindows::create(link.windows, response.stale, link.queue_pairs.size());
    if (!windows) continue;
    for (const auto& window : link.windows) {
      const auto found = windows->region(window.region);
      FUZZ_CHECK(found.status == rekindle::transport::OpStatus::kOk && found.bytes > 0);
      for (const std::uint64_t offset : {std::uint64_t{0}, window.offset, found.bytes - 1}) {
        const auto& at = windows->at(window.region, offset);
        FUZZ_CHECK(at.region == window.region && offset >= at.offset);
        FUZZ_CHECK(offset - at.offset < at.bytes);
        for (std::size_t i = 0; i < link.queue_pairs.size(); ++i) (void)at.key(i);
      }
    }
  }
  round_trip(response);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  if (const auto endpoint = Endpoint::parse(bytes)) check(*endpoint);
  if (const auto request = ConnectRequest::parse(bytes)) check(*request);
  if (const auto response = ConnectResponse::parse(bytes)) check(*response);
  return 0;
}
