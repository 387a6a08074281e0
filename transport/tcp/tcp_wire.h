#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "src/base/ids.h"
#include "src/base/result.h"
#include "transport/read_op.h"
#include "transport/session_hello.h"

// The data-stream format (docs/reference/wire-tcp.md): little-endian frames of fixed size. Encoding
// writes whole frames. Decoding takes whole frames and trusts nothing in them.
namespace rekindle::transport::tcp {

inline constexpr std::uint16_t kWireVersion = 2;
// Of releases before protocol 3: the reader sends its token, and nobody proves anything.
inline constexpr std::uint16_t kTokenWireVersion = 1;

inline constexpr std::size_t kClientHelloBytes = 48;
inline constexpr std::size_t kServerHelloBytes = 32;
// Of kWireVersion: the nonce follows the reader's hello, the challenge an answer of kOk.
inline constexpr std::size_t kNonceBytes = 32;
inline constexpr std::size_t kChallengeBytes = 64;
inline constexpr std::size_t kProofBytes = 32;
inline constexpr std::size_t kRequestBytes = 56;
inline constexpr std::size_t kResponseBytes = 24;

struct ClientHello {
  std::uint16_t version = kWireVersion;
  // Of the session: its handle, or its token in kTokenWireVersion.
  std::array<std::uint8_t, 16> session{};
  // The process that the client means to reach.
  Incarnation incarnation;
};

struct ServerHello {
  std::uint16_t version = kWireVersion;
  HelloStatus status = HelloStatus::kOk;
  Incarnation incarnation;  // of the server
};

// The source's half of an exchange. The reader answers with its own proof.
struct Challenge {
  HelloExchange::Nonce nonce{};
  HelloExchange::Proof proof{};
};

struct Request {
  std::uint64_t wr_id = 0;
  RegionKey region;
  StridedRange range;
};

struct Response {
  std::uint64_t wr_id = 0;
  OpStatus status = OpStatus::kOk;
  // Payload bytes that follow; 0 unless kOk.
  std::uint64_t bytes = 0;
};

void encode(const ClientHello& hello, std::span<std::byte, kClientHelloBytes> out);
void encode(const ServerHello& hello, std::span<std::byte, kServerHelloBytes> out);
void encode(const Challenge& challenge, std::span<std::byte, kChallengeBytes> out);
void encode(const Request& request, std::span<std::byte, kRequestBytes> out);
void encode(const Response& response, std::span<std::byte, kResponseBytes> out);

// kInvalid: the bytes are no such frame. A hello of an unknown version has no other field.
Result<ClientHello> decode_client_hello(std::span<const std::byte, kClientHelloBytes> in);
Result<ServerHello> decode_server_hello(std::span<const std::byte, kServerHelloBytes> in);
Challenge decode_challenge(std::span<const std::byte, kChallengeBytes> in);
Result<Request> decode_request(std::span<const std::byte, kRequestBytes> in);
Result<Response> decode_response(std::span<const std::byte, kResponseBytes> in);

}  // namespace rekindle::transport::tcp
