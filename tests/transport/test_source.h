#pragma once

#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tests/transport/transport_fixture.h"
#include "transport/path.h"
#include "transport/registry.h"

namespace rekindle::transport::testing {

// A source in this process: regions, sessions, one backend's server, and a connector to it.
template <typename ServerType, typename Options>
class TestSource {
 public:
  TestSource(std::unique_ptr<Connector> connector, const Options& options)
      : connector_(std::move(connector)) {
    serve(options);
  }

  // Serves with these options; a server from before ends first.
  void serve(const Options& options) {
    server_.reset();
    auto server = ServerType::create(options, registry_, incarnation_);
    if (!server) throw std::runtime_error(server.error().message());
    server_ = std::move(*server);
  }
  RegionKey add(const TestSegment& segment, bool with_file = true) {
    return registry_.add(segment.bytes(), with_file ? segment.fd() : -1, 0, {}, nullptr);
  }
  SessionToken admit(std::vector<RegionKey> regions, std::uint64_t rate = 0) {
    const SessionToken token = SessionToken::random();
    registry_.admit({.token = token,
                     .puller = "test",
                     .regions = std::move(regions),
                     .max_bytes_per_second = rate});
    return token;
  }
  PathTarget target(const SessionToken& token, std::string_view host = "127.0.0.1") const {
    return {std::string(connector_->transport()), server_->endpoint(host), token, incarnation_};
  }
  Result<std::unique_ptr<Path>> try_connect(const SessionToken& token) {
    return connector_->connect(target(token), test_deadline());
  }
  std::unique_ptr<Path> connect(const SessionToken& token) {
    auto path = try_connect(token);
    EXPECT_TRUE(path) << path.error().message();
    return path ? std::move(*path) : nullptr;
  }

  SegmentRegistry registry_;
  const Incarnation incarnation_ = Incarnation::random();
  std::unique_ptr<ServerType> server_;
  const std::unique_ptr<Connector> connector_;
};

}  // namespace rekindle::transport::testing
