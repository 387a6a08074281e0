#include "tests/device/round_session_fixture.h"

#include <algorithm>
#include <numeric>

#include <unistd.h>

#include "src/bucket/double_device.h"

namespace rekindle::device::testing {

RoundSessionTest::RoundSessionTest() {
  for (std::size_t i = 0; i < kRanks; ++i) {
    devices_.push_back(bucket::make_double_device(fmt::format("double:{}", i), 64 * kMiB));
    communicators_.push_back(std::make_unique<Communicators>(
        [this, i]() -> Result<std::unique_ptr<bucket::Collectives>> {
          if (flip_ && flip_->rank == i) return std::make_unique<FlippingCollectives>(*flip_);
          return Communicators::loader(true)();
        }));
  }
  pinner_.emplace(*devices_.front(), 2);
  cache_.emplace(*pinner_);
  times_.progress = 0ms;
}

Member RoundSessionTest::join(std::size_t index) {
  Member member;
  SessionOrder order;
  order.number = index + 1;
  order.open = [device = devices_[index].get()]() -> Result<bucket::Device*> { return device; };
  order.pinner = &*pinner_;
  order.communicators = communicators_[index].get();
  order.attached = *parse_attached(attached_frame(sample_, wanted_));
  order.leaves = leaves_.value_or(sample_.leaves());
  const bool blank = (lacks_ && index >= owners_) || index == wrong_copy_;
  const auto files = blank ? blank_files() : sample_.files();
  lent_[index].clear();
  for (std::size_t i = 0; i < files.size(); ++i) {
    lent_[index].emplace_back(::dup(files[i].get()));
    order.segments.push_back(*cache_->get(files[i].get(), sample_.segment_bytes[i]));
    // Bytes are kept only in pinned segments.
    if (lacks_) {
      EXPECT_TRUE(pinner_->wait(*order.segments.back(), SteadyClock().now() + 20s));
    }
  }
  order.slots.bucket_bytes = kBucket;
  order.slots.free_fraction = 1;
  order.times = times_;
  order.in_round = true;
  order.verify_upload = verify_upload_;
  order.say = [heard = member.heard](SessionNews news) { heard->say(std::move(news)); };
  member.start(std::move(order));
  member.worker->open();
  return member;
}

std::vector<UniqueFd> RoundSessionTest::blank_files() const {
  auto blank = sample_;
  for (std::string& segment : blank.segments) std::ranges::fill(segment, '?');
  return blank.files();
}

void RoundSessionTest::expect_kept(std::size_t rank, std::uint64_t bytes) const {
  const auto contents = sample_.contents();
  std::uint64_t right = 0;
  for (const auto& piece : contents.pieces()) {
    const auto expected = sample_.bytes_of(contents, piece);
    std::string seen(expected.size(), '\0');
    ASSERT_EQ(::pread(lent_.at(rank)[piece.segment].get(), seen.data(), seen.size(),
                      static_cast<off_t>(piece.offset_bytes)),
              static_cast<ssize_t>(seen.size()));
    for (std::size_t i = 0; i < seen.size(); ++i) {
      ASSERT_TRUE(seen[i] == expected[i] || seen[i] == '?') << piece.name() << " at " << i;
      if (seen[i] == expected[i]) ++right;
    }
  }
  EXPECT_GE(right, bytes);
  if (bytes == 0) {
    EXPECT_LT(right, contents.total_bytes() / 16) << "'?' by chance";
  }
}

SpreadOrder RoundSessionTest::order_for(std::size_t rank, std::size_t ranks,
                                        const std::string& id) const {
  SpreadOrder order;
  order.session = rank + 1;
  order.communicator = "c-1";
  order.id = id;
  order.rank = static_cast<std::uint32_t>(rank);
  order.ranks = order.ranks_here = static_cast<std::uint32_t>(ranks);
  order.bucket_bytes = kBucket;
  order.owners.resize(owners_);
  std::iota(order.owners.begin(), order.owners.end(), 0u);
  return order;
}

}  // namespace rekindle::device::testing
