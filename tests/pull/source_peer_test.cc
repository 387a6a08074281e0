// Metadata in pages, several at a time, from sources that answer in any order or send nonsense.
#include "recovery/pull/source_peer.h"

#include <algorithm>
#include <functional>
#include <random>
#include <set>

#include <gtest/gtest.h>

#include "recovery/rpc/methods.h"
#include "src/base/units.h"
#include "tests/recovery/rpc_fixture.h"

namespace rekindle::pull {
namespace {

using namespace std::chrono_literals;
using rpc::testing::make_identity;

class SourcePeerTest : public ::testing::Test {
 protected:
  using Answer = std::function<void(std::uint64_t offset, proto::GetPageResponse&)>;

  void SetUp() override {
    std::mt19937_64 random(5);
    blob_.resize(3 * kMiB + 12345);
    std::ranges::generate(blob_, [&] { return static_cast<char>(random()); });
    rpc::handle<proto::AGENT_GET_PAGE>(*server_, [this](const rpc::Peer&, auto request, auto) {
      return answer(std::move(request));
    });
    address_ = *server_->listen("127.0.0.1:0");
  }
  void TearDown() override { loop_.run(server_->close(5s)); }

  async::Task<Result<proto::GetPageResponse>> answer(proto::GetPageRequest request) {
    ++open_;
    most_open_ = std::max(most_open_, open_);
    offsets_.insert(request.offset());
    // Later pages overtake earlier ones.
    co_await rpc::testing::sleep_for(drip_ + std::chrono::milliseconds(random_() % 5));
    proto::GetPageResponse response;
    response.set_total_bytes(blob_.size());
    response.set_data(blob_.substr(request.offset(), page_bytes_));
    if (distort_) distort_(request.offset(), response);
    --open_;
    co_return response;
  }

  Result<std::string> fetch() {
    return loop_.run([](SourcePeerTest* test) -> async::Task<Result<std::string>> {
      CO_TRY(auto client, co_await rpc::RpcClient::connect(
                              test->address_, make_identity(proto::ROLE_PULLER, "p"), 5s));
      SourcePeer peer({}, std::move(client));
      auto blob = co_await peer.fetch_tile_digests(
          Digest{{1}}, {5s, [test] { ++test->pages_; }, test->grace_, test->most_bytes_});
      peer.close();
      co_return blob;
    }(this));
  }

  rpc::testing::Loop loop_;
  std::unique_ptr<rpc::RpcServer> server_ =
      rpc::RpcServer::create(loop_.executor(), make_identity(proto::ROLE_AGENT, "a"));
  std::string address_;
  std::mt19937_64 random_{6};
  std::string blob_;
  std::uint64_t page_bytes_ = 128 * kKiB;
  // Before each page.
  std::chrono::milliseconds drip_{0};
  std::chrono::milliseconds grace_{10'000};
  std::uint64_t most_bytes_ = SourcePeer::kMaxPagedBytes;
  Answer distort_;
  std::set<std::uint64_t> offsets_;
  int open_ = 0;
  int most_open_ = 0;
  int pages_ = 0;
};

TEST_F(SourcePeerTest, PagesThatComeInAnyOrderAreOneBlob) {
  const auto blob = fetch();
  ASSERT_TRUE(blob) << blob.error().message();
  EXPECT_EQ(*blob, blob_);
  EXPECT_EQ(offsets_.size(), 25u);
  EXPECT_EQ(pages_, 25) << "each of them is reported";
  EXPECT_EQ(most_open_, 4);
}

TEST_F(SourcePeerTest, ABlobOfOnePageIsAskedForOnce) {
  blob_ = "short";
  EXPECT_EQ(*fetch(), "short");
  EXPECT_EQ(offsets_.size(), 1u);
}

TEST_F(SourcePeerTest, PagesThatDoNotFitTogetherAreRefused) {
  const std::uint64_t third = 2 * page_bytes_;
  const std::vector<Answer> wrong = {
      [&](std::uint64_t offset, proto::GetPageResponse& page) {
        if (offset == third) page.mutable_data()->pop_back();
      },
      [&](std::uint64_t offset, proto::GetPageResponse& page) {
        if (offset == third) page.mutable_data()->push_back('x');
      },
      [&](std::uint64_t offset, proto::GetPageResponse& page) {
        if (offset == third) page.clear_data();
      },
      [&](std::uint64_t offset, proto::GetPageResponse& page) {
        if (offset == third) page.set_total_bytes(blob_.size() + 1);
      },
      [&](std::uint64_t, proto::GetPageResponse& page) { page.set_total_bytes(1); },
      // Very many pages.
      [&](std::uint64_t, proto::GetPageResponse& page) { page.mutable_data()->resize(1024); },
      [&](std::uint64_t, proto::GetPageResponse& page) { page.clear_data(); },
  };
  for (const Answer& distort : wrong) {
    distort_ = distort;
    const auto blob = fetch();
    ASSERT_FALSE(blob);
    EXPECT_EQ(blob.error().code(), ErrorCode::kCorrupt) << blob.error().message();
  }
}

TEST_F(SourcePeerTest, ASourceThatOffersTooMuchIsRefusedWithTheFirstPage) {
  distort_ = [](std::uint64_t, proto::GetPageResponse& page) { page.set_total_bytes(5 * kGiB); };
  const auto blob = fetch();
  ASSERT_FALSE(blob);
  EXPECT_EQ(blob.error().code(), ErrorCode::kInvalid) << blob.error().message();
  EXPECT_EQ(offsets_.size(), 1u);
  // More than such a checkpoint can have.
  distort_ = [](std::uint64_t, proto::GetPageResponse& page) { page.set_total_bytes(1 * kGiB); };
  offsets_.clear();
  most_bytes_ = kGiB - 1;
  EXPECT_EQ(fetch().error().code(), ErrorCode::kInvalid);
  EXPECT_EQ(offsets_.size(), 1u);
}

TEST_F(SourcePeerTest, ASourceThatDripsItsMetadataIsGivenUp) {
  // No page is late. All of them would take many times as long as they may.
  blob_.resize(900 * kKiB);
  page_bytes_ = 64 * kKiB;
  drip_ = 400ms;
  grace_ = 1s;
  const auto blob = fetch();
  ASSERT_FALSE(blob);
  EXPECT_EQ(blob.error().code(), ErrorCode::kTimeout);
  EXPECT_NE(blob.error().message().find("too slow"), std::string::npos) << blob.error().message();
  EXPECT_LT(offsets_.size(), 15u);
}

}  // namespace
}  // namespace rekindle::pull
