#include <algorithm>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <sys/wait.h>
#include <unistd.h>

#include <gtest/gtest.h>

#include "src/bucket/double_device.h"
#include "tests/support/must.h"

namespace rekindle::bucket {
namespace {

using namespace std::chrono_literals;

constexpr std::uint64_t kDeviceBytes = 64ull << 20;

TimePoint soon() { return SteadyClock().now() + 60s; }

// What rank `owner` brings as share `share` of turn `turn`.
std::byte byte_of(std::uint64_t turn, std::uint64_t share, std::uint64_t offset) {
  return static_cast<std::byte>(turn * 131 + share * 29 + offset * 7 + offset / 4096);
}

class Rank {
 public:
  Rank(Collectives& collectives, std::uint32_t rank, std::uint32_t ranks, const std::string& id)
      : rank_(rank),
        device(make_double_device("double:" + std::to_string(rank), kDeviceBytes)),
        stream(must(device->make_stream())),
        collective(must(collectives.meet(*device, rank, ranks, id))) {}
  void meet() {
    const TimePoint deadline = soon();
    while (!must(collective->settled())) {
      if (SteadyClock().now() > deadline) throw std::runtime_error("nobody came");
      std::this_thread::sleep_for(100us);
    }
  }
  // A bucket of which it has its own shares; the rest is wrong.
  void fill(std::uint64_t turn, std::uint64_t share_bytes, std::span<const std::uint32_t> owners) {
    memory = must(device->allocate(std::max<std::uint64_t>(share_bytes * owners.size(), 1)));
    for (std::size_t share = 0; share < owners.size(); ++share) {
      for (std::uint64_t i = 0; i < share_bytes; ++i) {
        data()[share * share_bytes + i] =
            owners[share] == rank_ ? byte_of(turn, share, i) : std::byte{'?'};
      }
    }
  }
  std::uint64_t wrong(std::uint64_t turn, std::uint64_t share_bytes, std::size_t shares) {
    std::uint64_t count = 0;
    for (std::size_t share = 0; share < shares; ++share) {
      for (std::uint64_t i = 0; i < share_bytes; ++i) {
        count += data()[share * share_bytes + i] != byte_of(turn, share, i);
      }
    }
    return count;
  }
  std::byte* data() { return reinterpret_cast<std::byte*>(memory->address()); }

 private:
  const std::uint32_t rank_;

 public:
  const std::unique_ptr<Device> device;
  std::unique_ptr<Memory> memory;
  const std::unique_ptr<Stream> stream;
  const std::unique_ptr<Collective> collective;
};

struct Turn {
  std::uint64_t share_bytes = 0;
  std::vector<std::uint32_t> owners;
};

std::uint64_t wrong_bytes(Collectives& collectives, std::uint32_t number, std::uint32_t ranks,
                          const std::string& id, const std::vector<Turn>& turns) {
  Rank rank(collectives, number, ranks, id);
  rank.meet();
  std::uint64_t wrong = 0;
  for (std::size_t turn = 0; turn < turns.size(); ++turn) {
    const auto& [share_bytes, owners] = turns[turn];
    rank.fill(turn, share_bytes, owners);
    must(rank.collective->spread(rank.memory->address(), share_bytes, owners, *rank.stream));
    must(rank.collective->settled());
    must(rank.stream->finish(soon()));
    wrong += rank.wrong(turn, share_bytes, owners.size());
  }
  return wrong;
}

std::vector<Turn> turns_of(std::mt19937_64& random, std::uint32_t ranks) {
  constexpr std::uint64_t kChunk = 512 << 10;
  std::vector<Turn> turns;
  for (const std::uint64_t bytes : {std::uint64_t{1}, kChunk - 1, kChunk, kChunk + 1,
                                    std::uint64_t{0}, 5 * kChunk + 77, std::uint64_t{4096}}) {
    Turn turn{bytes, std::vector<std::uint32_t>(ranks)};
    std::iota(turn.owners.begin(), turn.owners.end(), 0u);
    if (random() % 2 == 0) {
      std::shuffle(turn.owners.begin(), turn.owners.end(), random);
      turn.owners.resize(1 + random() % ranks);
    }
    turns.push_back(std::move(turn));
  }
  return turns;
}

// Meetings that some process of this test still has open or mapped.
std::size_t meetings_of_this_process() {
  constexpr std::string_view kName = "rekindle-meeting";
  std::size_t count = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;
    const auto link = std::filesystem::read_symlink(entry.path(), gone);
    if (!gone && link.string().find(kName) != std::string::npos) ++count;
  }
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) count += line.find(kName) != std::string::npos;
  return count;
}

TEST(DoubleCollective, EveryRankGetsEveryShareFromItsOwner) {
  const std::uint64_t seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  for (const std::uint32_t ranks : {1u, 2u, 3u, 4u}) {
    const auto collectives = make_double_collectives();
    const std::string id = must(collectives->make_id());
    const auto turns = turns_of(random, ranks);
    std::vector<std::uint64_t> wrong(ranks);
    std::vector<std::thread> threads;
    for (std::uint32_t rank = 0; rank < ranks; ++rank) {
      threads.emplace_back(
          [&, rank] { wrong[rank] = wrong_bytes(*collectives, rank, ranks, id, turns); });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(wrong, std::vector<std::uint64_t>(ranks));
  }
}

// Starts a process that does `body`; its result is its exit code.
template <typename Body>
pid_t in_child(const Body& body) {
  const pid_t pid = ::fork();
  if (pid != 0) return pid;
  int code = 111;
  try {
    code = body();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "child: %s\n", error.what());
  }
  ::_exit(code);
}
int exit_code(pid_t pid) {
  int status = 0;
  if (::waitpid(pid, &status, 0) != pid || !WIFEXITED(status)) return -1;
  return WEXITSTATUS(status);
}

TEST(DoubleCollective, RanksOfTwoProcessesMeet) {
  std::mt19937_64 random(7);
  const auto turns = turns_of(random, 2);
  const auto collectives = make_double_collectives();
  const std::string id = must(collectives->make_id());
  const pid_t child = in_child([&] {
    const auto others = make_double_collectives();
    return wrong_bytes(*others, 1, 2, id, turns) == 0 ? 0 : 1;
  });
  ASSERT_GT(child, 0);
  EXPECT_EQ(wrong_bytes(*collectives, 0, 2, id, turns), 0u);
  EXPECT_EQ(exit_code(child), 0);
}

TEST(DoubleCollective, AMeetingIsOverOnceAllHaveComeAndNotBefore) {
  const auto collectives = make_double_collectives();
  const std::string id = must(collectives->make_id());
  const Rank first(*collectives, 0, 2, id);
  EXPECT_FALSE(must(first.collective->settled()));
  const auto device = make_double_device("double:9", 1 << 20);
  EXPECT_EQ(collectives->meet(*device, 0, 2, id).error().code(), ErrorCode::kInvalid) << "twice";
  EXPECT_EQ(collectives->meet(*device, 1, 3, id).error().code(), ErrorCode::kInvalid) << "of three";
  EXPECT_FALSE(must(first.collective->settled()));
  const Rank second(*collectives, 1, 2, id);
  EXPECT_TRUE(must(first.collective->settled()));
  EXPECT_TRUE(must(second.collective->settled()));
  EXPECT_EQ(second.collective->rank(), 1u);
  EXPECT_EQ(second.collective->ranks(), 2u);
  EXPECT_FALSE(collectives->meet(*device, 1, 2, id)) << "it is over";
}

TEST(DoubleCollective, WhatIsNoMeetingIsRefused) {
  const auto collectives = make_double_collectives();
  const auto device = make_double_device("double:0", 1 << 20);
  const std::string id = must(collectives->make_id());
  const auto refused = [&](std::uint32_t rank, std::uint32_t ranks, const std::string& by) {
    const auto met = collectives->meet(*device, rank, ranks, by);
    return !met && (met.error().code() == ErrorCode::kInvalid ||
                    met.error().code() == ErrorCode::kPeerLost);
  };
  EXPECT_TRUE(refused(2, 2, id));
  EXPECT_TRUE(refused(0, 0, id));
  EXPECT_TRUE(refused(0, 100'000, id));
  for (std::size_t size = 0; size < id.size(); ++size)
    EXPECT_TRUE(refused(0, 2, id.substr(0, size)));
  EXPECT_TRUE(refused(0, 2, id + "0"));
  EXPECT_TRUE(refused(0, 2, "/etc/passwd"));
  std::string other = id;
  other.back() = other.back() == '0' ? '1' : '0';
  EXPECT_TRUE(refused(0, 2, other)) << "another meeting at the same place";
  const std::string nonce = id.substr(id.rfind(':'));
  EXPECT_TRUE(refused(0, 2, "double:" + std::to_string(::getpid()) + ":0" + nonce));
  EXPECT_FALSE(refused(0, 2, id));
}

TEST(DoubleCollective, OwnersThatAreNoRanksAreRefused) {
  const auto collectives = make_double_collectives();
  Rank rank(*collectives, 0, 1, must(collectives->make_id()));
  rank.meet();
  const std::vector<std::uint32_t> nobody{1};
  EXPECT_EQ(rank.collective->spread(0, 1, nobody, *rank.stream).error().code(),
            ErrorCode::kInvalid);
}

// As with NCCL: the event behind it comes, and the bytes are whatever.
TEST(DoubleCollective, Row43WhatWaitsForARankThatIsGoneEndsWhenItIsAborted) {
  const auto collectives = make_double_collectives();
  const std::string id = must(collectives->make_id());
  Rank one(*collectives, 0, 2, id);
  const Rank two(*collectives, 1, 2, id);
  one.meet();
  const std::vector<std::uint32_t> owners{0, 1};
  one.fill(0, 100, owners);
  const auto filled = must(one.device->make_event());
  must(one.collective->spread(one.memory->address(), 100, owners, *one.stream));
  EXPECT_TRUE(must(one.collective->settled())) << "it is queued";
  must(one.stream->record(*filled));
  EXPECT_FALSE(one.stream->finish(SteadyClock().now() + 20ms));
  two.collective->abort();
  EXPECT_FALSE(one.stream->finish(SteadyClock().now() + 20ms)) << "nobody tells it";
  EXPECT_TRUE(must(one.collective->settled()));
  one.collective->abort();
  must(one.stream->finish(soon()));
  EXPECT_TRUE(must(one.device->is_done(*filled)));
  EXPECT_FALSE(one.collective->settled());
  EXPECT_FALSE(one.collective->spread(one.memory->address(), 100, owners, *one.stream));
  const Upload upload{.from = one.data(), .to = one.memory->address() + 100, .run_bytes = 100};
  must(one.stream->upload({&upload, 1}));
  must(one.stream->finish(soon()));
  EXPECT_EQ(one.data()[100], one.data()[0]) << "the stream goes on";
}

TEST(DoubleCollective, AStreamThatWaitsForARankCanGo) {
  const auto collectives = make_double_collectives();
  const std::string id = must(collectives->make_id());
  Rank one(*collectives, 0, 2, id);
  const Rank two(*collectives, 1, 2, id);
  const std::vector<std::uint32_t> owners{1};
  one.fill(0, 100, owners);
  must(one.collective->spread(one.memory->address(), 100, owners, *one.stream));
  // Its destructor must not hang.
}

TEST(DoubleCollective, ARankThatNeverComesLeavesNothing) {
  ASSERT_EQ(meetings_of_this_process(), 0u);
  auto collectives = make_double_collectives();
  const std::string id = must(collectives->make_id());
  must(collectives->make_id());
  EXPECT_EQ(meetings_of_this_process(), 2u);
  {
    const Rank alone(*collectives, 0, 2, id);
    EXPECT_FALSE(must(alone.collective->settled()));
  }
  EXPECT_EQ(meetings_of_this_process(), 1u) << "who came has left again";
  collectives.reset();
  EXPECT_EQ(meetings_of_this_process(), 0u);
}

TEST(DoubleCollective, AMeetingThatAllCameToHasNoFile) {
  const auto collectives = make_double_collectives();
  const std::string id = must(collectives->make_id());
  const Rank one(*collectives, 0, 2, id);
  const Rank two(*collectives, 1, 2, id);
  EXPECT_EQ(meetings_of_this_process(), 3u) << "the maker's descriptor and two mappings";
  EXPECT_TRUE(must(one.collective->settled()));
  EXPECT_EQ(meetings_of_this_process(), 2u);
}

TEST(DoubleCollective, Row43AMeetingWhoseMakerIsDeadIsOver) {
  int fds[2];
  ASSERT_EQ(::pipe(fds), 0);
  const pid_t maker = in_child([&] {
    const auto collectives = make_double_collectives();
    const std::string id = must(collectives->make_id());
    if (::write(fds[1], id.data(), id.size()) < 0) return 1;
    ::pause();
    return 0;
  });
  ASSERT_GT(maker, 0);
  std::string id(200, '\0');
  const ssize_t size = ::read(fds[0], id.data(), id.size());
  ASSERT_GT(size, 0);
  id.resize(static_cast<std::size_t>(size));
  const auto collectives = make_double_collectives();
  {
    const Rank here(*collectives, 1, 2, id);
    EXPECT_FALSE(must(here.collective->settled()));
  }
  ::kill(maker, SIGKILL);
  ::waitpid(maker, nullptr, 0);
  ::close(fds[0]);
  ::close(fds[1]);
  const auto device = make_double_device("double:0", 1 << 20);
  const auto met = collectives->meet(*device, 0, 2, id);
  ASSERT_FALSE(met);
  EXPECT_EQ(met.error().code(), ErrorCode::kPeerLost);
}

}  // namespace
}  // namespace rekindle::bucket
