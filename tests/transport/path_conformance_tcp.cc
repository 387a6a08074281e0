#include <csignal>

#include "tests/support/fault_proxy.h"
#include "tests/transport/path_conformance.h"
#include "transport/tcp/tcp_transport.h"

namespace rekindle::transport::testing {
namespace {

struct TcpSource : TestSource<tcp::TcpServer, tcp::ServerOptions> {
  // Every kernel has reno, under which files are sent by sendfile().
  TcpSource()
      : TestSource(tcp::make_connector("reno"),
                   {.listen_host = "127.0.0.1", .congestion = "reno"}) {}
};
using TcpFixture = SourceFixture<TcpSource>;

struct TlsSource : TestSource<tcp::TcpServer, tcp::ServerOptions> {
  TlsSource()
      : TestSource(tcp::make_connector({}, tcp::Encryption::kAlways),
                   {.listen_host = "127.0.0.1", .require_encryption = true}) {
    std::signal(SIGPIPE, SIG_IGN);  // as the rekindle command does
  }
};
using TlsFixture = SourceFixture<TlsSource>;

// Behind a proxy that can hold the answers back: from here the peer looks stopped.
template <typename Fixture>
class Proxied final : public Fixture {
 public:
  Proxied() : proxy_(this->source_.server_->port()) { this->endpoint_ = proxy_.address(); }
  void freeze_peer(bool frozen) override { proxy_.stall(frozen); }
  void kill_peer() override {
    Fixture::kill_peer();
    proxy_.cut();
  }

 private:
  rekindle::testing::FaultProxy proxy_;
};

INSTANTIATE_TEST_SUITE_P(
    Tcp, PathConformance,
    ::testing::Values(PathBackend{"Tcp", [] { return std::make_unique<TcpFixture>(); }},
                      // Regions without a file are sent from memory, not by sendfile().
                      PathBackend{"TcpMemory", [] { return std::make_unique<TcpFixture>(false); }},
                      PathBackend{"Tls", [] { return std::make_unique<TlsFixture>(); }},
                      PathBackend{"TlsMemory", [] { return std::make_unique<TlsFixture>(false); }}),
    [](const auto& parameter) { return parameter.param.name; });

INSTANTIATE_TEST_SUITE_P(
    Tcp, FreezablePathConformance,
    ::testing::Values(
        PathBackend{"Proxied", [] { return std::make_unique<Proxied<TcpFixture>>(); }},
        PathBackend{"ProxiedTls", [] { return std::make_unique<Proxied<TlsFixture>>(); }}),
    [](const auto& parameter) { return parameter.param.name; });

}  // namespace
}  // namespace rekindle::transport::testing
