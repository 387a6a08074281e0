#include "recovery/pull/path_opener.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace rekindle::pull {
namespace {

using ::testing::ElementsAre;

class StubConnector final : public transport::HandshakeConnector {
 public:
  explicit StubConnector(bool usable) : usable_(usable) {}
  std::string_view transport() const override { return "verbs"; }
  bool usable() const override { return usable_; }
  Result<std::unique_ptr<transport::Handshake>> begin(const transport::PathTarget&,
                                                      std::span<const std::string>) override {
    return fail(ErrorCode::kUnavailable, "not here");
  }
  std::shared_ptr<const void> use_memory(std::span<std::byte>,
                                         std::shared_ptr<MemoryLife>) override {
    return nullptr;
  }
  void prepare_memory(std::span<std::byte>, std::shared_ptr<MemoryLife>, TimePoint) override {}

 private:
  const bool usable_;
};

class Transports : public ::testing::Test {
 protected:
  std::vector<std::string> choose(const TransportChoice& choice, bool verbs_usable = true) {
    StubConnector verbs(verbs_usable);
    const std::vector<transport::HandshakeConnector*> handshakes{&verbs};
    return transports_for(choice, handshakes);
  }
};

TEST_F(Transports, TheBestComesFirstAndTcpIsAlwaysThere) {
  EXPECT_THAT(choose({.same_host = true}), ElementsAre("shm", "verbs", "tcp"));
  EXPECT_THAT(choose({}), ElementsAre("verbs", "tcp"));
}

TEST_F(Transports, AForcedTransportIsTheOnlyOneWhateverItsState) {
  EXPECT_THAT(choose({.forced = "verbs", .same_host = true}, false), ElementsAre("verbs"));
  EXPECT_THAT(choose({.forced = "tcp"}), ElementsAre("tcp"));
}

TEST_F(Transports, WithoutARailVerbsIsNotAskedFor) {
  EXPECT_THAT(choose({}, false), ElementsAre("tcp"));
}

// Otherwise a pull whose rails all went down would stay slow, and nobody would hear why.
TEST_F(Transports, AUsedTransportIsAskedForAgainAlthoughNoRailIsUp) {
  EXPECT_THAT(choose({.used = {"verbs"}}, false), ElementsAre("verbs", "tcp"));
}

TEST_F(Transports, ATransportThatBrokeWithThisSourceIsLeftOut) {
  EXPECT_THAT(choose({.used = {"verbs"}, .avoid = {"verbs"}}), ElementsAre("tcp"));
}

}  // namespace
}  // namespace rekindle::pull
