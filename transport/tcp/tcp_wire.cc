#include "transport/tcp/tcp_wire.h"

#include <bit>
#include <cstring>
#include <type_traits>

namespace rekindle::transport::tcp {
namespace {

static_assert(std::endian::native == std::endian::little,
              "the data stream is little-endian; add byte swaps for this machine");

constexpr std::uint64_t kHelloMagic = 0x31'41'54'41'44'4b'45'52;  // "REKDATA1"
constexpr std::uint32_t kRequestTag = 0x51'52'4b'52;              // "RKRQ"
constexpr std::uint32_t kResponseTag = 0x53'52'4b'52;             // "RKRS"

// Appends fixed-size fields to a frame.
class Writer {
 public:
  explicit Writer(std::span<std::byte> out) : out_(out) {}
  template <typename T>
  void put(const T& value) {
    static_assert(std::is_trivially_copyable_v<T>);
    std::memcpy(out_.data(), &value, sizeof value);
    out_ = out_.subspan(sizeof value);
  }

 private:
  std::span<std::byte> out_;
};

class Reader {
 public:
  explicit Reader(std::span<const std::byte> in) : in_(in) {}
  template <typename T>
  T get() {
    static_assert(std::is_trivially_copyable_v<T>);
    T value;
    std::memcpy(&value, in_.data(), sizeof value);
    in_ = in_.subspan(sizeof value);
    return value;
  }

 private:
  std::span<const std::byte> in_;
};

}  // namespace

void encode(const ClientHello& hello, std::span<std::byte, kClientHelloBytes> out) {
  Writer writer(out);
  writer.put(kHelloMagic);
  writer.put(hello.version);
  writer.put(std::uint16_t{0});
  writer.put(std::uint32_t{0});
  writer.put(hello.session);
  writer.put(hello.incarnation.bytes);
}

void encode(const ServerHello& hello, std::span<std::byte, kServerHelloBytes> out) {
  Writer writer(out);
  writer.put(kHelloMagic);
  writer.put(hello.version);
  writer.put(static_cast<std::uint16_t>(hello.status));
  writer.put(std::uint32_t{0});
  writer.put(hello.incarnation.bytes);
}

void encode(const Challenge& challenge, std::span<std::byte, kChallengeBytes> out) {
  Writer writer(out);
  writer.put(challenge.nonce);
  writer.put(challenge.proof);
}

void encode(const Request& request, std::span<std::byte, kRequestBytes> out) {
  Writer writer(out);
  writer.put(kRequestTag);
  writer.put(std::uint32_t{0});
  writer.put(request.wr_id);
  writer.put(request.region.region);
  writer.put(request.region.generation);
  writer.put(request.range.offset);
  writer.put(request.range.run_bytes);
  writer.put(request.range.count);
  writer.put(request.range.stride);
}

void encode(const Response& response, std::span<std::byte, kResponseBytes> out) {
  Writer writer(out);
  writer.put(kResponseTag);
  writer.put(static_cast<std::uint32_t>(response.status));
  writer.put(response.wr_id);
  writer.put(response.bytes);
}

Result<ClientHello> decode_client_hello(std::span<const std::byte, kClientHelloBytes> in) {
  Reader reader(in);
  if (reader.get<std::uint64_t>() != kHelloMagic) {
    return fail(ErrorCode::kInvalid, "not a rekindle data stream");
  }
  ClientHello hello;
  hello.version = reader.get<std::uint16_t>();
  const auto flags = reader.get<std::uint16_t>();
  const auto reserved = reader.get<std::uint32_t>();
  if (hello.version != kWireVersion && hello.version != kTokenWireVersion) return hello;
  if (flags != 0 || reserved != 0) {
    return fail(ErrorCode::kInvalid, "hello with unknown flags {:#x}", flags);
  }
  hello.session = reader.get<decltype(hello.session)>();
  hello.incarnation.bytes = reader.get<decltype(hello.incarnation.bytes)>();
  return hello;
}

Result<ServerHello> decode_server_hello(std::span<const std::byte, kServerHelloBytes> in) {
  Reader reader(in);
  if (reader.get<std::uint64_t>() != kHelloMagic) {
    return fail(ErrorCode::kInvalid, "the peer does not speak the rekindle data protocol");
  }
  ServerHello hello;
  hello.version = reader.get<std::uint16_t>();
  const auto status = reader.get<std::uint16_t>();
  if (status > static_cast<std::uint16_t>(HelloStatus::kNotEncrypted)) {
    return fail(ErrorCode::kInvalid, "the peer answered the hello with unknown status {}", status);
  }
  hello.status = static_cast<HelloStatus>(status);
  reader.get<std::uint32_t>();
  hello.incarnation.bytes = reader.get<decltype(hello.incarnation.bytes)>();
  return hello;
}

Challenge decode_challenge(std::span<const std::byte, kChallengeBytes> in) {
  Reader reader(in);
  Challenge challenge;
  challenge.nonce = reader.get<decltype(challenge.nonce)>();
  challenge.proof = reader.get<decltype(challenge.proof)>();
  return challenge;
}

Result<Request> decode_request(std::span<const std::byte, kRequestBytes> in) {
  Reader reader(in);
  const auto tag = reader.get<std::uint32_t>();
  const auto flags = reader.get<std::uint32_t>();
  if (tag != kRequestTag || flags != 0) {
    return fail(ErrorCode::kInvalid, "not a request frame (tag {:#x}, flags {:#x})", tag, flags);
  }
  Request request;
  request.wr_id = reader.get<std::uint64_t>();
  request.region.region = reader.get<std::uint32_t>();
  request.region.generation = reader.get<std::uint32_t>();
  request.range.offset = reader.get<std::uint64_t>();
  request.range.run_bytes = reader.get<std::uint64_t>();
  request.range.count = reader.get<std::uint64_t>();
  request.range.stride = reader.get<std::uint64_t>();
  return request;
}

Result<Response> decode_response(std::span<const std::byte, kResponseBytes> in) {
  Reader reader(in);
  const auto tag = reader.get<std::uint32_t>();
  const auto status = reader.get<std::uint32_t>();
  if (tag != kResponseTag || status > static_cast<std::uint32_t>(OpStatus::kFault)) {
    return fail(ErrorCode::kInvalid, "not a response frame (tag {:#x}, status {})", tag, status);
  }
  Response response;
  response.status = static_cast<OpStatus>(status);
  response.wr_id = reader.get<std::uint64_t>();
  response.bytes = reader.get<std::uint64_t>();
  return response;
}

}  // namespace rekindle::transport::tcp
