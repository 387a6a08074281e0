#pragma once

#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

#include "src/base/ids.h"
#include "tests/transport/transport_fixture.h"
#include "transport/verbs/verbs_transport.h"

namespace rekindle::transport::verbs {

// Two hosts in one process: a source and a puller.
class VerbsSource {
 public:
  VerbsSource(Api& api, const FabricOptions& options, const RegistrarOptions& registrar = {},
              const VerbsServerOptions& server = {},
              const Incarnation& incarnation = Incarnation::random())
      : incarnation_(incarnation),
        fabric_(open(api, options)),
        registrar_(MemoryRegistrar::create(*fabric_, registrar)),
        server_(VerbsServer::create(*fabric_, *registrar_, registry_, incarnation_, server)) {}
  ~VerbsSource() { server_.reset(); }

  static std::unique_ptr<Fabric> open(Api& api, const FabricOptions& options) {
    auto fabric = Fabric::open(api, options);
    if (!fabric) throw std::runtime_error(fabric.error().message());
    if ((*fabric)->rails().empty()) throw std::runtime_error((*fabric)->why_empty());
    return std::move(*fabric);
  }

  RegionKey serve(const testing::TestSegment& segment) {
    return registry_.add(segment.bytes(), segment.fd(), 0, {}, nullptr);
  }
  SessionToken admit(std::vector<RegionKey> regions, std::uint64_t bytes_per_second = 0) {
    const SessionToken token = SessionToken::random();
    registry_.admit({.token = token,
                     .puller = "test",
                     .regions = std::move(regions),
                     .max_bytes_per_second = bytes_per_second});
    return token;
  }
  void revoke(const SessionToken& token) {
    registry_.revoke(token);
    server_->drop_session(token);
  }
  PathTarget target(const SessionToken& token) const {
    return {"verbs", server_->endpoint(""), token, incarnation_};
  }
  void stop() { server_.reset(); }

  SegmentRegistry& registry() { return registry_; }
  VerbsServer* server() { return server_.get(); }  // null once stopped
  Fabric& fabric() { return *fabric_; }

 private:
  const Incarnation incarnation_;
  const std::unique_ptr<Fabric> fabric_;
  const std::unique_ptr<MemoryRegistrar> registrar_;
  SegmentRegistry registry_;
  std::unique_ptr<VerbsServer> server_;
};

class VerbsPuller {
 public:
  VerbsPuller(Api& api, const FabricOptions& options, const VerbsConnectorOptions& connector = {})
      : fabric_(VerbsSource::open(api, options)),
        registrar_(MemoryRegistrar::create(*fabric_, {})),
        connector_(make_connector(*fabric_, *registrar_, connector)) {}

  // The handshake, without a control connection between the two.
  Result<Paths> connect(VerbsSource& source, const SessionToken& token,
                        std::span<const std::string> in_use = {}) {
    if (source.server() == nullptr) return fail(ErrorCode::kUnavailable, "the source is gone");
    TRY(const auto handshake, connector_->begin(source.target(token), in_use));
    TRY(const std::string answer, source.server()->accept(token, handshake->request()));
    return handshake->finish(answer);
  }
  // Registered when it returns.
  std::shared_ptr<const void> use(std::span<std::byte> memory) {
    auto used = connector_->use_memory(memory, nullptr);
    (void)testing::eventually([&] { return registrar_->stats().bytes >= memory.size(); });
    return used;
  }

  HandshakeConnector& connector() { return *connector_; }
  Fabric& fabric() { return *fabric_; }
  MemoryRegistrar& registrar() { return *registrar_; }

 private:
  const std::unique_ptr<Fabric> fabric_;
  const std::unique_ptr<MemoryRegistrar> registrar_;
  const std::unique_ptr<HandshakeConnector> connector_;
};

}  // namespace rekindle::transport::verbs
