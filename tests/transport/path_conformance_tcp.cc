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

// Behind a proxy that can hold the answers back: from here the peer looks stopped.
class ProxiedTcpFixture final : public TcpFixture {
 public:
  ProxiedTcpFixture() : proxy_(source_.server_->port()) { endpoint_ = proxy_.address(); }
  void freeze_peer(bool frozen) override { proxy_.stall(frozen); }
  void kill_peer() override {
    TcpFixture::kill_peer();
    proxy_.cut();
  }

 private:
  rekindle::testing::FaultProxy proxy_;
};

INSTANTIATE_TEST_SUITE_P(
    Tcp, PathConformance,
    ::testing::Values(PathBackend{"Tcp", [] { return std::make_unique<TcpFixture>(); }},
                      // Regions without a file are sent from memory, not by sendfile().
                      PathBackend{"TcpMemory", [] { return std::make_unique<TcpFixture>(false); }}),
    [](const auto& parameter) { return parameter.param.name; });

INSTANTIATE_TEST_SUITE_P(Tcp, FreezablePathConformance,
                         ::testing::Values(PathBackend{
                             "Proxied", [] { return std::make_unique<ProxiedTcpFixture>(); }}),
                         [](const auto& parameter) { return parameter.param.name; });

}  // namespace
}  // namespace rekindle::transport::testing
