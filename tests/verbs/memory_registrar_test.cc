// Registration: pieces, rights, what devices refuse, what they have too little of, and the end.
#include "transport/verbs/memory/memory_registrar.h"

#include <atomic>
#include <cerrno>
#include <fstream>
#include <iterator>
#include <random>
#include <thread>

#include <sys/stat.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/verbs/registrar_fixture.h"

namespace rekindle::transport::verbs {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

constexpr int kReadWrite = PROT_READ | PROT_WRITE;

class Registrar : public RegistrarFixture {};

TEST_F(Registrar, EveryByteIsInAPieceOfEveryDevice) {
  open();
  const MappedFile file(7 * kMiB + 123, kReadWrite);
  const auto memory = add_settled(file, MemoryUse::kServe);
  EXPECT_THAT(problems(*memory), IsEmpty());
  for (const auto& device : fabric->devices()) {
    const auto pieces = memory->pieces(*device);
    ASSERT_GE(pieces.size(), 4u);
    std::uint64_t next = 0;
    for (const Piece& piece : pieces) {
      EXPECT_EQ(piece.offset, next);
      EXPECT_LE(piece.bytes, 2 * kMiB);
      EXPECT_EQ(piece.address, reinterpret_cast<std::uint64_t>(file.bytes.data()) + piece.offset);
      EXPECT_EQ(piece.lkey, piece.mr->lkey);
      for (const std::uint64_t at : {piece.offset, piece.offset + piece.bytes - 1}) {
        const Piece* const found = memory->find(*device, at);
        ASSERT_NE(found, nullptr);
        EXPECT_EQ(found->offset, piece.offset);
      }
      next += piece.bytes;
    }
    EXPECT_EQ(next, file.bytes.size());
    EXPECT_EQ(memory->find(*device, next), nullptr);
  }
  EXPECT_EQ(registrar->stats().bytes, 2 * file.bytes.size());
  EXPECT_EQ(registrar->stats().pieces, memory->change_count());
}

TEST_F(Registrar, WindowsNeedNoRemoteRightsAndLandingOnlyWrites) {
  open({});
  const MappedFile file(kMiB, kReadWrite);
  const auto serve = add_settled(file, MemoryUse::kServe);
  EXPECT_THAT(network.access_flags(names[0]),
              Each(IBV_ACCESS_MW_BIND | IBV_ACCESS_RELAXED_ORDERING));
  const auto land = add_settled(file, MemoryUse::kLand);
  EXPECT_THAT(network.access_flags(names[0]),
              ElementsAre(IBV_ACCESS_MW_BIND | IBV_ACCESS_RELAXED_ORDERING,
                          IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_RELAXED_ORDERING));
}

TEST_F(Registrar, WithoutWindowsNoKeyOpensServedMemory) {
  change([](FakeDevice& device) { device.attr.device_cap_flags = 0; });
  open({});
  const MappedFile file(kMiB, kReadWrite);
  const auto memory = add_settled(file, MemoryUse::kServe);
  EXPECT_THAT(network.access_flags(names[1]), IsEmpty());
  ASSERT_EQ(memory->problems().size(), 2u);
  EXPECT_THAT(memory->problems().front().message(), HasSubstr("no memory windows"));
  const auto land = add_settled(file, MemoryUse::kLand);
  EXPECT_THAT(network.access_flags(names[1]),
              Each(IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_RELAXED_ORDERING));
}

TEST_F(Registrar, ADeviceWithoutRelaxedOrderingIsAskedOnce) {
  network.change(names[0], [](FakeDevice& device) { device.takes_relaxed_ordering = false; });
  open();
  const MappedFile file(8 * kMiB, kReadWrite);
  const auto memory = add_settled(file, MemoryUse::kServe);
  EXPECT_EQ(total(memory->pieces(device(0))), file.bytes.size());
  EXPECT_THAT(network.access_flags(names[0]), Each(IBV_ACCESS_MW_BIND));
  EXPECT_EQ(network.calls(FakeCall::kRegMr, names[0]), memory->pieces(device(0)).size() + 1);
  EXPECT_THAT(network.access_flags(names[1]),
              Each(IBV_ACCESS_MW_BIND | IBV_ACCESS_RELAXED_ORDERING));
}

TEST_F(Registrar, AReadOnlyMappingThatIsRefusedIsMappedOnceMore) {
  network.change(names[0], [](FakeDevice& device) { device.takes_read_only = false; });
  open();
  const MappedFile file(8 * kMiB, PROT_READ, 3 * kPageBytes);
  ASSERT_EQ(::pwrite(file.fd.get(), "mark", 4, static_cast<off_t>(file.offset + 5 * kMiB)), 4);
  const auto memory = add_settled(file, MemoryUse::kServe);
  EXPECT_THAT(problems(*memory), IsEmpty());
  const Piece* const piece = memory->find(device(0), 5 * kMiB);
  ASSERT_NE(piece, nullptr);
  const std::uint64_t address = piece->address + (5 * kMiB - piece->offset);
  EXPECT_NE(address, reinterpret_cast<std::uint64_t>(file.bytes.data()) + 5 * kMiB);
  EXPECT_EQ(std::memcmp(reinterpret_cast<const void*>(address), "mark", 4), 0);
  EXPECT_EQ(total(memory->pieces(device(1))), file.bytes.size());
  // Refused twice (with and without relaxed ordering), then known.
  EXPECT_EQ(network.calls(FakeCall::kRegMr, names[0]), memory->pieces(device(0)).size() + 2);
}

// A copy whose file has another ctime counts as changed, and is verified again.
TEST_F(Registrar, AMappingThatIsPinnedForWritingLeavesTheFileUnchanged) {
  change([](FakeDevice& device) {
    device.takes_read_only = false;
    device.pins_pages = true;
  });
  open();
  const MappedFile file(8 * kMiB, PROT_READ);
  const auto changed = [&] {
    struct stat status {};
    EXPECT_EQ(::fstat(file.fd.get(), &status), 0);
    return status.st_ctim;
  };
  const timespec before = changed();
  // Until a change would be another time on the clock that files are stamped with.
  timespec now = before;
  while (now.tv_sec == before.tv_sec && now.tv_nsec == before.tv_nsec) {
    ASSERT_EQ(::clock_gettime(CLOCK_REALTIME_COARSE, &now), 0);
  }
  for (int i = 0; i < 2; ++i) {  // the first finds out that it must be writable
    const auto memory = add_settled(file, MemoryUse::kServe);
    EXPECT_EQ(total(memory->pieces(device(0))), file.bytes.size());
  }
  EXPECT_EQ(changed().tv_sec, before.tv_sec);
  EXPECT_EQ(changed().tv_nsec, before.tv_nsec);
}

TEST_F(Registrar, AReadOnlyMappingWithoutAFileIsSaidToNeedWriting) {
  change([](FakeDevice& device) { device.takes_read_only = false; });
  open({});
  const MappedFile file(kMiB, PROT_READ);
  const auto memory = registrar->add(file.bytes, MemoryUse::kServe, -1, 0, nullptr);
  ASSERT_TRUE(memory->wait_settled(soon()));
  EXPECT_THAT(problems(*memory), SizeIs(2));
  EXPECT_THAT(memory->pieces(device(0)), IsEmpty());
}

// A running program: even root may not open it for writing.
TEST_F(Registrar, AFileThatMayNotBeWrittenToIsSaidToBeSo) {
  change([](FakeDevice& device) { device.takes_read_only = false; });
  open({});
  const UniqueFd file(::open("/proc/self/exe", O_RDONLY | O_CLOEXEC));
  constexpr std::size_t kSize = 64 * kKiB;
  void* const mapped = ::mmap(nullptr, kSize, PROT_READ, MAP_SHARED, file.get(), 0);
  ASSERT_NE(mapped, MAP_FAILED);
  auto memory = registrar->add({static_cast<const std::byte*>(mapped), kSize}, MemoryUse::kServe,
                               file.get(), 0, nullptr);
  ASSERT_TRUE(memory->wait_settled(soon()));
  EXPECT_THAT(memory->pieces(device(0)), IsEmpty());
  EXPECT_THAT(problems(*memory), SizeIs(2));
  EXPECT_THAT(problems(*memory), Each(HasSubstr("cannot be opened for writing")));
  EXPECT_EQ(memory->problems()[0].code(), ErrorCode::kDenied);
  memory.reset();
  ::munmap(mapped, kSize);
}

TEST_F(Registrar, APieceThatFailsLeavesAHoleOnItsDeviceOnly) {
  open();
  network.fail_call(FakeCall::kRegMr, {.error = ENODATA, .nth = 2, .device = names[0]});
  const MappedFile file(8 * kMiB, kReadWrite);
  const auto memory = add_settled(file, MemoryUse::kServe);
  EXPECT_EQ(total(memory->pieces(device(1))), file.bytes.size());
  const auto pieces = memory->pieces(device(0));
  const std::uint64_t missing = file.bytes.size() - total(pieces);
  EXPECT_EQ(missing, 2 * kMiB);
  const std::uint64_t hole = pieces[0].bytes;
  EXPECT_EQ(memory->find(device(0), hole), nullptr);
  EXPECT_NE(memory->find(device(0), hole + 2 * kMiB), nullptr);
  EXPECT_NE(memory->find(device(1), hole), nullptr);
  EXPECT_THAT(
      problems(*memory),
      ElementsAre(AllOf(HasSubstr("mlx5_0"), HasSubstr("2.00 MiB of 8.00 MiB not registered"),
                        HasSubstr("(6.00 MiB are)"), HasSubstr("No data available"))));
  EXPECT_EQ(registrar->stats().failures, 1u);
  EXPECT_EQ(registrar->stats().bytes, 14 * kMiB);
}

TEST_F(Registrar, ALimitStopsWhatItWillHitButNotASmallerRest) {
  open({.max_piece_bytes = 2 * kMiB, .max_bytes_per_device = 5 * kMiB});
  const MappedFile file(8 * kMiB + kMiB / 2, kReadWrite);
  const auto memory = add_settled(file, MemoryUse::kServe);
  const std::uint64_t registered = total(memory->pieces(device(0)));
  EXPECT_GT(registered, 4 * kMiB - 1);
  EXPECT_LE(registered, 5 * kMiB);
  EXPECT_THAT(problems(*memory), SizeIs(2));
  EXPECT_THAT(problems(*memory), Each(HasSubstr("the limit set for each device is 5.00 MiB")));
  EXPECT_EQ(network.calls(FakeCall::kRegMr), registrar->stats().pieces) << "none tried in vain";
}

TEST_F(Registrar, TheLimitIsOfAllRegionsTogetherAndComesBack) {
  open({.max_piece_bytes = 2 * kMiB, .max_bytes_per_device = 4 * kMiB});
  const MappedFile file(3 * kMiB, kReadWrite);
  auto first = add_settled(file, MemoryUse::kServe);
  EXPECT_THAT(problems(*first), IsEmpty());
  auto second = add_settled(file, MemoryUse::kLand);
  EXPECT_LE(total(second->pieces(device(0))), kMiB);
  EXPECT_THAT(problems(*second), SizeIs(2));
  first.reset();
  second.reset();
  EXPECT_EQ(registrar->stats().bytes, 0u);
  EXPECT_EQ(registrar->stats().pieces, 0u);
  EXPECT_THAT(problems(*add_settled(file, MemoryUse::kServe)), IsEmpty());
}

TEST_F(Registrar, ADeviceThatTakesNoMoreRegionsIsNotAskedAgain) {
  network.change(names[0], [](FakeDevice& device) { device.attr.max_mr = 2; });
  open();
  const MappedFile file(16 * kMiB, kReadWrite);
  const auto memory = add_settled(file, MemoryUse::kServe);
  EXPECT_THAT(memory->pieces(device(0)), SizeIs(2));
  EXPECT_EQ(network.calls(FakeCall::kRegMr, names[0]), 3u);
  EXPECT_THAT(problems(*memory),
              ElementsAre(AllOf(HasSubstr("mlx5_0"), HasSubstr("takes 2 regions"))));
}

TEST_F(Registrar, PiecesKeepToTheDeviceMaximum) {
  network.change(names[0], [](FakeDevice& device) { device.attr.max_mr_size = 300'000; });
  open({});
  const MappedFile file(kMiB, kReadWrite);
  const auto memory = add_settled(file, MemoryUse::kServe);
  EXPECT_EQ(total(memory->pieces(device(0))), file.bytes.size());
  for (const Piece& piece : memory->pieces(device(0))) EXPECT_LE(piece.bytes, 300'000u);
  EXPECT_THAT(memory->pieces(device(1)).size(), ::testing::Le(2u));
}

TEST_F(Registrar, AFileCutShortIsAProblemAndNoCrash) {
  open();
  const MappedFile file(8 * kMiB, kReadWrite);
  file.truncate(3 * kMiB);
  for (const MemoryUse use : {MemoryUse::kServe, MemoryUse::kLand}) {
    const auto memory = add_settled(file, use);
    const std::uint64_t registered = total(memory->pieces(device(0)));
    EXPECT_GT(registered, 0u);
    EXPECT_LE(registered, 3 * kMiB);
    EXPECT_THAT(problems(*memory), SizeIs(2));
    EXPECT_THAT(problems(*memory), Each(HasSubstr("cut it short")));
    EXPECT_EQ(memory->problems()[0].code(), ErrorCode::kCorrupt);
  }
}

TEST_F(Registrar, ServedBytesAreNeverWrittenTo) {
  open();
  const MappedFile file(4 * kMiB, kReadWrite);  // a hole: no page is there yet
  const auto memory = add_settled(file, MemoryUse::kServe);
  EXPECT_EQ(total(memory->pieces(device(0))), file.bytes.size());
  struct stat now {};
  ASSERT_EQ(::fstat(file.fd.get(), &now), 0);
  for (const std::byte byte : file.bytes) ASSERT_EQ(byte, std::byte{0});
}

TEST_F(Registrar, ADeadDeviceGetsNothingNew) {
  open();
  network.remove_device(names[0]);
  const TimePoint deadline = soon();
  while (!device(0).dead() && SteadyClock().now() < deadline) std::this_thread::yield();
  ASSERT_TRUE(device(0).dead());
  const std::uint64_t before = network.calls(FakeCall::kRegMr, names[0]);
  const MappedFile file(4 * kMiB, kReadWrite);
  const auto memory = add_settled(file, MemoryUse::kServe);
  EXPECT_THAT(memory->pieces(device(0)), IsEmpty());
  EXPECT_EQ(network.calls(FakeCall::kRegMr, names[0]), before);
  EXPECT_EQ(total(memory->pieces(device(1))), file.bytes.size());
  EXPECT_THAT(problems(*memory),
              ElementsAre(AllOf(HasSubstr("mlx5_0"), HasSubstr("the device is gone"))));
}

// Its thread sleeps: state 'S' in /proc.
bool is_asleep(pid_t thread) {
  std::ifstream stat(fmt::format("/proc/self/task/{}/stat", thread));
  std::string text((std::istreambuf_iterator<char>(stat)), {});
  const auto name_end = text.rfind(')');
  return name_end != std::string::npos && text.compare(name_end, 3, ") S") == 0;
}

TEST_F(Registrar, GoingAwayWaitsForThePieceInProgressOnly) {
  open();
  network.hold(FakeCall::kRegMr);
  const MappedFile file(16 * kMiB, kReadWrite);
  auto keep_alive = std::make_shared<int>(1);
  const std::weak_ptr<int> alive = keep_alive;
  auto memory = add(file, MemoryUse::kServe, std::move(keep_alive));
  ASSERT_TRUE(network.wait_held(FakeCall::kRegMr, 2, soon()));
  EXPECT_FALSE(memory->settled());
  EXPECT_FALSE(memory->wait_settled(SteadyClock().now()));
  const std::weak_ptr<RegisteredMemory> going = memory;
  std::atomic<pid_t> id = 0;
  std::thread end([&] {
    id = ::gettid();
    memory.reset();
  });
  const TimePoint deadline = soon();
  while (!(going.expired() && is_asleep(id)) && SteadyClock().now() < deadline) {
    std::this_thread::yield();
  }
  ASSERT_TRUE(going.expired() && is_asleep(id)) << "it waits";
  EXPECT_FALSE(alive.expired());
  network.let_go(FakeCall::kRegMr);
  end.join();
  EXPECT_TRUE(alive.expired());
  EXPECT_EQ(network.calls(FakeCall::kRegMr), 2u) << "one piece on each device";
  EXPECT_EQ(registrar->stats().bytes, 0u);
}

TEST_F(Registrar, ADeviceThatHangsHoldsNoOtherUp) {
  open();
  network.hold(FakeCall::kRegMr, names[0]);
  const MappedFile file(4 * kMiB, kReadWrite);
  const auto memory = add(file, MemoryUse::kServe);
  const MappedFile other(kMiB, kReadWrite);
  const auto others = add(other, MemoryUse::kServe);
  const TimePoint deadline = soon();
  while (total(others->pieces(device(1))) < kMiB && SteadyClock().now() < deadline) {
    std::this_thread::yield();
  }
  EXPECT_EQ(total(others->pieces(device(1))), kMiB);
  EXPECT_THAT(others->pieces(device(0)), IsEmpty());
  EXPECT_FALSE(others->settled());
  network.let_go(FakeCall::kRegMr, names[0]);
  EXPECT_TRUE(others->wait_settled(soon()));
  EXPECT_TRUE(memory->wait_settled(soon()));
}

TEST_F(Registrar, DevicesRegisterAtTheSameTime) {
  open();
  network.hold(FakeCall::kRegMr);
  const MappedFile file(kMiB, kReadWrite);
  const auto memory = add(file, MemoryUse::kServe);
  EXPECT_TRUE(network.wait_held(FakeCall::kRegMr, 2, soon()));
  network.let_go(FakeCall::kRegMr);
  EXPECT_TRUE(memory->wait_settled(soon()));
}

TEST_F(Registrar, AnEmptyRegionIsSettled) {
  open();
  const auto memory = registrar->add({}, MemoryUse::kServe, -1, 0, nullptr);
  EXPECT_TRUE(memory->settled());
  EXPECT_EQ(memory->find(device(0), 0), nullptr);
}

TEST_F(Registrar, WhereAForkWouldBreakRegistrationsNoDeviceIsUsed) {
  api.set_fork_error(ENOSYS);
  open();
  EXPECT_THAT(fabric->devices(), IsEmpty());
  EXPECT_THAT(fabric->why_empty(), AllOf(HasSubstr("fork"), HasSubstr("5.12")));
}

class NoDevices : public RegistrarFixture {
 protected:
  NoDevices() : RegistrarFixture(0) {}
};

TEST_F(NoDevices, NothingIsRegisteredAndThatIsSettled) {
  open();
  const MappedFile file(kMiB, kReadWrite);
  const auto memory = add_settled(file, MemoryUse::kServe);
  EXPECT_TRUE(memory->settled());
  EXPECT_THAT(problems(*memory), IsEmpty());
}

class ManyDevices : public RegistrarFixture {
 protected:
  ManyDevices() : RegistrarFixture(5) {}
};

TEST_F(ManyDevices, FewerThreadsThanDevicesServeAllOfThem) {
  open({.threads = 2, .max_piece_bytes = 256 * kKiB});
  const MappedFile file(8 * kMiB, kReadWrite);
  const auto memory = add_settled(file, MemoryUse::kLand);
  for (const auto& device : fabric->devices()) {
    EXPECT_EQ(total(memory->pieces(*device)), file.bytes.size());
  }
}

// Readers look things up while pieces come, regions come and go, and calls fail.
TEST_F(ManyDevices, LookupsRunBesideRegistration) {
  const std::uint64_t seed = std::random_device{}();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  std::mt19937_64 random(seed);
  open({.max_piece_bytes = 64 * kKiB});
  const MappedFile file(4 * kMiB, kReadWrite);
  for (int round = 0; round < 20; ++round) {
    network.fail_call(FakeCall::kRegMr, {.error = ENODATA, .nth = 1 + random() % 200});
    auto memory = add(file, MemoryUse::kServe);
    std::vector<std::thread> readers;
    for (std::size_t i = 0; i < 2; ++i) {
      readers.emplace_back([&, i, start = random()] {
        std::uint64_t at = start;
        for (int look = 0; look < 2000; ++look) {
          at = at * 6364136223846793005u + 1442695040888963407u;
          const std::uint64_t offset = (at >> 20) % file.bytes.size();
          const Piece* const piece = memory->find(device(i), offset);
          if (piece == nullptr) continue;
          ASSERT_TRUE(offset >= piece->offset && offset - piece->offset < piece->bytes);
          ASSERT_NE(piece->mr, nullptr);
        }
      });
    }
    if (round % 2 == 0) {
      EXPECT_TRUE(memory->wait_settled(soon()));
    }
    for (std::thread& reader : readers) reader.join();
    memory.reset();
    EXPECT_EQ(registrar->stats().bytes, 0u);
    for (const std::string& name : names) EXPECT_EQ(network.registrations(name), 0u);
  }
}

}  // namespace
}  // namespace rekindle::transport::verbs
