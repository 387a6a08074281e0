#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "recovery/rpc/convert.h"
#include "recovery/rpc/frame_codec.h"
#include "recovery/rpc/handshake.h"
#include "recovery/rpc/rpc.h"

// Bytes from the network: the decoder must give the same frames however they are cut, must not keep
// more than it was fed, and what decodes must encode again. Hellos go through the hello's checks.
namespace {

using namespace rekindle;

void require(bool condition) {
  if (!condition) __builtin_trap();
}

struct Outcome {
  std::string bodies;
  bool failed = false;
};

Outcome decode(std::string_view bytes, std::size_t step) {
  rpc::FrameDecoder decoder(rpc::kMaxHelloFrameBytes);
  Outcome outcome;
  while (!bytes.empty() && !outcome.failed) {
    const auto part = bytes.substr(0, step);
    bytes.remove_prefix(part.size());
    decoder.feed(part);
    for (;;) {
      auto body = decoder.next();
      if (!body) {
        outcome.failed = true;
        require(!decoder.next());  // for good
        break;
      }
      if (!*body) break;
      outcome.bodies += **body;
      outcome.bodies += '|';
    }
  }
  return outcome;
}

void check_frame(const proto::Frame& frame) {
  const auto bytes = rpc::encode_frame(frame);
  require(bytes.has_value());
  require(rpc::decode_frame(std::string_view(*bytes).substr(rpc::kFrameHeaderBytes)).has_value());
  if (frame.has_hello()) {
    const rpc::Identity identity{.role = proto::ROLE_AGENT, .node_id = "fuzz"};
    const auto own = rpc::make_hello(identity, "", {});
    if (const auto peer = rpc::check_hello(own, frame.hello())) {
      require(peer->node_id.size() <= 255);
    }
  }
  if (frame.has_response()) {
    const auto status = rpc::from_status(frame.response().status());
    if (!status) require(status.error().message().find('\n') == std::string::npos);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  const Outcome whole = decode(bytes, size == 0 ? 1 : size);
  const Outcome cut = decode(bytes, 1 + size % 7);
  require(whole.bodies == cut.bodies && whole.failed == cut.failed);
  if (auto frame = rpc::decode_frame(bytes)) check_frame(*frame);
  rpc::FrameDecoder decoder(rpc::kMaxHelloFrameBytes);
  decoder.feed(bytes);
  for (;;) {
    auto body = decoder.next();
    if (!body || !*body) break;
    if (auto frame = rpc::decode_frame(**body)) check_frame(*frame);
  }
  return 0;
}
