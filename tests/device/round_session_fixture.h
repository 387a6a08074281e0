#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include <gtest/gtest.h>

#include "recovery/device/process/pinned_copies.h"
#include "src/base/units.h"
#include "tests/device/faulty_collectives.h"
#include "tests/device/started_session.h"

namespace rekindle::device::testing {

using namespace std::chrono_literals;

inline constexpr std::uint64_t kBucket = 64 * kKiB;

// The reports of a session. The test's thread waits for them.
class Heard {
 public:
  void say(SessionNews news) {
    const std::lock_guard lock(mutex_);
    if (auto* const joined = std::get_if<DeviceJoined>(&news)) joined_ = std::move(*joined);
    if (auto* const over = std::get_if<SpreadOver>(&news)) {
      if (over_) ADD_FAILURE() << "it was over before";
      over_ = std::move(*over);
    }
    if (auto* const progress = std::get_if<SpreadProgress>(&news)) {
      EXPECT_GT(progress->bytes, bytes_);
      bytes_ = progress->bytes;
    }
    changed_.notify_all();
  }
  DeviceJoined joined() { return wait(joined_); }
  SpreadOver over() { return wait(over_); }
  bool is_over() {
    const std::lock_guard lock(mutex_);
    return over_.has_value();
  }

 private:
  template <typename T>
  T wait(std::optional<T>& item) {
    std::unique_lock lock(mutex_);
    if (!changed_.wait_for(lock, 20s, [&] { return item.has_value(); })) {
      throw std::runtime_error("nothing is said");
    }
    return *item;
  }
  std::mutex mutex_;
  std::condition_variable changed_;
  std::optional<DeviceJoined> joined_;
  std::optional<SpreadOver> over_;
  std::uint64_t bytes_ = 0;
};

struct Member : StartedSession {
  std::shared_ptr<Heard> heard = std::make_shared<Heard>();
};

// Sessions that take part in a broadcast round, each on a device of its own.
class RoundSessionTest : public ::testing::Test {
 protected:
  static constexpr std::size_t kRanks = 3;
  using Members = std::vector<Member>;

  RoundSessionTest();

  Member join(std::size_t index);
  // The segments of a host that lacks the version.
  std::vector<UniqueFd> blank_files() const;
  // At least `bytes` bytes were kept in the segments that a rank was lent. The others are
  // unchanged.
  void expect_kept(std::size_t rank, std::uint64_t bytes) const;
  Members join_all(std::size_t ranks = 2) {
    Members members;
    for (std::size_t i = 0; i < ranks; ++i) members.push_back(join(i));
    return members;
  }
  SpreadOrder order_for(std::size_t rank, std::size_t ranks, const std::string& id) const;
  void spread(Members& members, const std::string& id) {
    for (std::size_t i = 0; i < members.size(); ++i) {
      if (i < owners_) members[i].session->tell({}, true);
      members[i].session->spread(order_for(i, members.size(), id));
    }
  }
  Members begin_round(std::size_t ranks = 2) {
    auto members = join_all(ranks);
    spread(members, *communicators_[0]->make_id());
    return members;
  }
  // Every worker takes one bucket and keeps it, so the round has begun and does not end.
  static std::vector<bucket::FilledMessage> take_one_each(Members& members) {
    std::vector<bucket::FilledMessage> taken;
    for (auto& member : members) {
      taken.push_back(member.worker->next().value());
      member.worker->read(taken.back());
    }
    return taken;
  }
  void expect_all_by_round(Member& member) {
    const auto over = member.heard->over();
    EXPECT_FALSE(over.error) << over.error->message();
    EXPECT_FALSE(over.worker_lost) << over.worker_lost->message();
    EXPECT_EQ(over.bytes, sample_.contents(wanted_).total_bytes());
    EXPECT_GT(over.buckets, 3u);
    expect_all(member);
  }
  void expect_all(Member& member) {
    member.taken.get();
    EXPECT_EQ(member.worker->compare(sample_, wanted_), "");
    const auto end = member.wait();
    EXPECT_FALSE(end.error) << end.error->message();
    EXPECT_EQ(end.bytes, sample_.contents(wanted_).total_bytes());
  }
  void expect_nothing_used() const {
    for (const auto& device : devices_) {
      EXPECT_EQ(device->memory()->free_bytes, device->memory()->total_bytes);
    }
  }

  const bucket::testing::Sample sample_ =
      bucket::testing::sample_of({{"a", DType::kBF16, Shape{700, 512}},
                                  {"b", DType::kF32, Shape{33, 77}},
                                  {"none", DType::kF32, Shape{0, 4}},
                                  {"scalar", DType::kI64, Shape{}},
                                  {"c", DType::kU8, Shape{9, 70'001}}},
                                 7, kMiB);
  SessionTimes times_;
  // Of every session; empty: all.
  std::vector<bucket::NamedBox> wanted_;
  // Unset: the right ones.
  std::optional<std::vector<Digest>> leaves_;
  bool verify_upload_ = false;
  // Set before its rank joins.
  std::optional<Flip> flip_;
  // The rank whose host has other bytes.
  std::optional<std::size_t> wrong_copy_;
  // The first ranks own shares. With `lacks_`, the hosts of the other ranks have no copy.
  std::size_t owners_ = 2;
  bool lacks_ = false;
  // The segments that each rank was lent.
  std::map<std::size_t, std::vector<UniqueFd>> lent_;
  std::vector<std::unique_ptr<bucket::Device>> devices_;
  // One per rank, as in several processes.
  std::vector<std::unique_ptr<Communicators>> communicators_;
  std::optional<bucket::Pinner> pinner_;
  std::optional<SegmentCache> cache_;
};

}  // namespace rekindle::device::testing
