#include <algorithm>
#include <cctype>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/read.hpp>
#include <boost/asio/write.hpp>

#include "recovery/rpc/address.h"
#include "recovery/rpc/http_server.h"
#include "tests/fuzz/fuzz_check.h"

// The requests of strangers to the status page, the probes and the metrics. The server ends each
// connection, adds no header that the request could choose, and still answers the next one.
namespace {

using namespace rekindle::rpc;
namespace asio = boost::asio;
using asio::ip::tcp;

constexpr std::string_view kHonest =
    "GET /ready HTTP/1.1\r\nHost: fuzz\r\nConnection: close\r\n\r\n";

bool is_text(std::string_view text) {
  return std::ranges::none_of(text, [](char c) { return c == '\r' || c == '\n' || c == '\0'; });
}

class Victim {
 public:
  Victim() {
    auto server = HttpServer::listen(io_.get_executor(), "--fuzz", "127.0.0.1:0",
                                     [](const HttpRequest& request) {
                                       FUZZ_CHECK(is_text(request.target) && is_text(request.host));
                                       HttpAnswer answer{200, "body\n"};
                                       answer.etag = "v1";
                                       answer.headers = {{"X-Host", std::string(request.host)}};
                                       return answer;
                                     });
    FUZZ_CHECK(server.has_value());
    server_ = std::move(*server);
    port_ = HostPort::parse(server_->address())->port;
  }

  // What it answers to these bytes, until it closes.
  std::string ask(std::string_view bytes) {
    tcp::socket socket(io_);
    boost::system::error_code error;
    socket.connect({asio::ip::address_v4::loopback(), port_}, error);
    FUZZ_CHECK(!error);
    std::string answer;
    bool ended = false;
    asio::async_write(socket, asio::buffer(bytes),
                      [&](const boost::system::error_code&, std::size_t) {
                        boost::system::error_code ignored;
                        socket.shutdown(tcp::socket::shutdown_send, ignored);
                      });
    asio::async_read(socket, asio::dynamic_buffer(answer),
                     [&](const boost::system::error_code&, std::size_t) { ended = true; });
    const auto give_up = std::chrono::steady_clock::now() + std::chrono::seconds(4);
    while (!ended) {
      FUZZ_CHECK(std::chrono::steady_clock::now() < give_up);
      io_.run_one_for(std::chrono::milliseconds(50));
    }
    return answer;
  }

 private:
  asio::io_context io_{1};
  std::unique_ptr<HttpServer> server_;
  std::uint16_t port_ = 0;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static Victim victim;
  const std::string answer = victim.ask({reinterpret_cast<const char*>(data), size});
  FUZZ_CHECK(answer.empty() || answer.starts_with("HTTP/1."));
  FUZZ_CHECK(victim.ask(kHonest).find("X-Host: fuzz\r\n") != std::string::npos);
  return 0;
}
