// Registration on real devices: the use of pieces, the refusals of the kernel, and the message for
// a process that may not lock memory. Each test is a process of its own, as dropped rights stay
// dropped.
#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <thread>

#include <linux/capability.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "src/base/unique_fd.h"
#include "src/base/units.h"
#include "tests/rdma/rails.h"
#include "transport/verbs/link/verbs_connection.h"
#include "transport/verbs/memory/memory_registrar.h"

namespace rekindle::transport::verbs {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

TimePoint in_two_minutes() { return SteadyClock().now() + std::chrono::minutes(2); }

struct Mapping {
  Mapping(int descriptor, std::uint64_t size, int protection) {
    void* const mapped = ::mmap(nullptr, size, protection, MAP_SHARED, descriptor, 0);
    EXPECT_NE(mapped, MAP_FAILED) << std::strerror(errno);
    if (mapped != MAP_FAILED) bytes = {static_cast<std::byte*>(mapped), size};
  }
  ~Mapping() { ::munmap(bytes.data(), bytes.size()); }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  std::span<std::byte> bytes;
};

UniqueFd memory_file(std::uint64_t size, unsigned flags = 0) {
  UniqueFd fd(static_cast<int>(::memfd_create("rekindle-test", MFD_CLOEXEC | flags)));
  EXPECT_EQ(::ftruncate(fd.get(), static_cast<off_t>(size)), 0) << std::strerror(errno);
  return fd;
}

std::byte byte_at(std::uint64_t offset) { return std::byte(offset * 31 % 253); }

// From now on this process may lock as much as its limit says, and no more.
void become_ordinary(std::uint64_t limit_bytes) {
  const rlimit limit{limit_bytes, limit_bytes};
  ASSERT_EQ(::setrlimit(RLIMIT_MEMLOCK, &limit), 0);
  __user_cap_header_struct header{_LINUX_CAPABILITY_VERSION_3, 0};
  __user_cap_data_struct data[2] = {};
  ASSERT_EQ(::syscall(SYS_capget, &header, data), 0);
  data[0].effective &= ~(1U << CAP_IPC_LOCK);
  ASSERT_EQ(::syscall(SYS_capset, &header, data), 0);
}

class RegistrationRdma : public ::testing::Test {
 protected:
  void SetUp() override {
    rails = rekindle::testing::rdma_rails();
    if (rails.a.empty()) GTEST_SKIP() << "this host has no RDMA device with an active port";
  }
  // The first devices of both sides.
  void open(const RegistrarOptions& options = {}) {
    std::string hca = "=" + rails.a[0];
    if (rails.b[0] != rails.a[0]) hca += "," + rails.b[0];
    auto opened = Fabric::open(*api, {.hca = hca});
    ASSERT_TRUE(opened) << opened.error().message();
    fabric = std::move(*opened);
    ASSERT_FALSE(fabric->rails().empty()) << fabric->why_empty();
    registrar = MemoryRegistrar::create(*fabric, options);
  }
  Rail& rail(const std::string& device) {
    for (const auto& rail : fabric->rails()) {
      if (rail->device().name() == device) return *rail;
    }
    throw std::runtime_error(device + " has no rail");
  }
  const Device& source_device() { return rail(rails.b[0]).device(); }
  const Device& puller_device() { return rail(rails.a[0]).device(); }

  std::shared_ptr<RegisteredMemory> add(std::span<const std::byte> bytes, MemoryUse use, int fd) {
    auto memory = registrar->add(bytes, use, fd, 0, nullptr);
    EXPECT_TRUE(memory->wait_settled(in_two_minutes()));
    return memory;
  }
  static std::uint64_t total(const std::vector<Piece>& pieces) {
    std::uint64_t bytes = 0;
    for (const Piece& piece : pieces) bytes += piece.bytes;
    return bytes;
  }
  static std::string problems(const RegisteredMemory& memory) {
    std::string lines;
    for (const Error& error : memory.problems()) lines += error.message() + "\n";
    return lines;
  }

  // A queue pair at each end.
  void connect() {
    auto made_here = Connection::create(rail(rails.a[0]), {.queue_pairs = 1});
    auto made_there = Connection::create(rail(rails.b[0]), {.queue_pairs = 1});
    ASSERT_TRUE(made_here && made_there);
    here = std::move(*made_here);
    there = std::move(*made_there);
    const auto remote = [](const Connection& end) {
      return RemoteEnd{.address = end.rail().state().address,
                       .mtu_bytes = 1024,
                       .rd_atomic = 1,
                       .queue_pairs = end.ends()};
    };
    ASSERT_TRUE(here->connect(remote(*there), ConnectionRole::kReads));
    ASSERT_TRUE(there->connect(remote(*here), ConnectionRole::kServes));
  }
  static ibv_wc_status post(Connection& end, ibv_send_wr wr) {
    wr.send_flags = IBV_SEND_SIGNALED;
    ibv_send_wr* bad = nullptr;
    EXPECT_EQ(end.api().post_send(end.queue_pair(0), &wr, &bad), 0);
    ibv_wc wc{};
    const TimePoint deadline = in_two_minutes();
    while (SteadyClock().now() < deadline) {
      const int count = end.api().poll_cq(end.cq(), 1, &wc);
      EXPECT_GE(count, 0);
      if (count == 1) return wc.status;
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
    return IBV_WC_GENERAL_ERR;
  }
  // Of a window, as a puller's session gets them.
  std::uint32_t rkey_for(const Piece& piece) {
    window = {there->api().alloc_mw(source_device().pd(), IBV_MW_TYPE_2), {&there->api()}};
    ibv_send_wr bind{};
    bind.opcode = IBV_WR_BIND_MW;
    bind.bind_mw.mw = window.get();
    bind.bind_mw.rkey = ibv_inc_rkey(window->rkey);
    bind.bind_mw.bind_info = {piece.mr, piece.address, piece.bytes, IBV_ACCESS_REMOTE_READ};
    EXPECT_EQ(post(*there, bind), IBV_WC_SUCCESS);
    return bind.bind_mw.rkey;
  }
  // Windows first: soft-RoCE takes a minute to destroy a queue pair that has one.
  void disconnect() {
    window.reset();
    here.reset();
    there.reset();
  }
  // Reads `count` bytes at `offset` of the served memory to the beginning of the destination.
  ibv_wc_status read(const RegisteredMemory& served, std::uint64_t offset,
                     const RegisteredMemory& landed, std::uint32_t count) {
    const Piece* const from = served.find(source_device(), offset);
    const Piece* const to = landed.find(puller_device(), 0);
    if (from == nullptr || to == nullptr) return IBV_WC_GENERAL_ERR;
    ibv_sge entry{to->address, count, to->lkey};
    ibv_send_wr wr{};
    wr.opcode = IBV_WR_RDMA_READ;
    wr.sg_list = &entry;
    wr.num_sge = 1;
    wr.wr.rdma.remote_addr = from->address + (offset - from->offset);
    wr.wr.rdma.rkey = rkey_for(*from);
    return post(*here, wr);
  }

  rekindle::testing::Rails rails;
  std::unique_ptr<Api> api = make_system_api();
  std::unique_ptr<Fabric> fabric;
  std::unique_ptr<MemoryRegistrar> registrar;
  std::unique_ptr<Connection> here, there;
  MwHandle window;
};

// Memory as a store serves it: mapped for reading only.
TEST_F(RegistrationRdma, AGibibyteMappedReadOnlyIsServedByPiece) {
  open({.max_piece_bytes = 256 * kMiB});
  const UniqueFd file = memory_file(kGiB);
  constexpr std::uint64_t kAt = 700 * kMiB + 12'345;
  constexpr std::uint32_t kCount = kMiB;
  {
    const Mapping writer(file.get(), kGiB, PROT_READ | PROT_WRITE);
    for (std::uint64_t i = kAt; i < kAt + kCount; ++i) writer.bytes[i] = byte_at(i);
  }
  const Mapping segment(file.get(), kGiB, PROT_READ);
  auto served = add(segment.bytes, MemoryUse::kServe, file.get());
  EXPECT_EQ(problems(*served), "");
  EXPECT_EQ(total(served->pieces(source_device())), kGiB);
  EXPECT_EQ(total(served->pieces(puller_device())), kGiB);
  const Piece* const piece = served->find(source_device(), kAt);
  ASSERT_NE(piece, nullptr);
  const bool again =
      piece->address != reinterpret_cast<std::uint64_t>(segment.bytes.data()) + piece->offset;
  RecordProperty("mapped_again", again ? "yes" : "no");
  std::printf("a read-only mapping was %s\n", again ? "mapped again, writable" : "taken as it is");

  const UniqueFd destination = memory_file(kCount);
  const Mapping landing(destination.get(), kCount, PROT_READ | PROT_WRITE);
  auto landed = add(landing.bytes, MemoryUse::kLand, destination.get());
  connect();
  ASSERT_EQ(read(*served, kAt, *landed, kCount), IBV_WC_SUCCESS);
  for (std::uint64_t i = 0; i < kCount; ++i) ASSERT_EQ(landing.bytes[i], byte_at(kAt + i));
  disconnect();
}

TEST_F(RegistrationRdma, TheMemlockLimitIsNamedAndWhatFitsIsUsed) {
  constexpr std::uint64_t kLimit = 48 * kMiB;
  become_ordinary(kLimit);
  open({.max_piece_bytes = 16 * kMiB});
  const UniqueFd file = memory_file(128 * kMiB);
  const Mapping segment(file.get(), 128 * kMiB, PROT_READ | PROT_WRITE);
  auto memory = add(segment.bytes, MemoryUse::kServe, file.get());
  std::uint64_t registered = 0;
  for (const auto& device : fabric->devices()) registered += total(memory->pieces(*device));
  EXPECT_GT(registered, 0u);
  EXPECT_LE(registered, kLimit) << "pinned memory counts once for each device";
  ASSERT_FALSE(memory->problems().empty());
  EXPECT_THAT(problems(*memory),
              AllOf(HasSubstr("of 128.0 MiB"), HasSubstr("memlock limit is 48.0 MiB"),
                    HasSubstr("ulimit -l")));
  std::printf("%s", problems(*memory).c_str());
  // Memory that was given back may be used again.
  memory.reset();
  EXPECT_EQ(registrar->stats().bytes, 0u);
  auto small = add(segment.bytes.first(8 * kMiB), MemoryUse::kServe, file.get());
  EXPECT_EQ(problems(*small), "");
}

TEST_F(RegistrationRdma, AFileCutShortIsAProblemOfItsPiecesOnly) {
  open({.max_piece_bytes = 4 * kMiB});
  const UniqueFd file = memory_file(16 * kMiB);
  const Mapping segment(file.get(), 16 * kMiB, PROT_READ);
  ASSERT_EQ(::ftruncate(file.get(), 6 * kMiB), 0);
  auto memory = add(segment.bytes, MemoryUse::kServe, file.get());
  const std::uint64_t registered = total(memory->pieces(source_device()));
  EXPECT_GT(registered, 0u);
  EXPECT_LE(registered, 6 * kMiB);
  EXPECT_THAT(problems(*memory), HasSubstr("cut it short"));
}

// Pinned pages stay: readers get old bytes, and nobody crashes.
TEST_F(RegistrationRdma, AFileCutShortAfterwardsIsStillReadable) {
  open();
  const UniqueFd file = memory_file(4 * kMiB);
  const Mapping segment(file.get(), 4 * kMiB, PROT_READ | PROT_WRITE);
  auto served = add(segment.bytes, MemoryUse::kServe, file.get());
  const UniqueFd destination = memory_file(kMiB);
  const Mapping landing(destination.get(), kMiB, PROT_READ | PROT_WRITE);
  auto landed = add(landing.bytes, MemoryUse::kLand, destination.get());
  connect();
  ASSERT_EQ(::ftruncate(file.get(), 0), 0);
  EXPECT_EQ(read(*served, 0, *landed, kMiB), IBV_WC_SUCCESS);
  disconnect();
}

// Row 24 of the faults: the child writes to everything, and the parent's NIC still reaches the
// parent's memory.
TEST_F(RegistrationRdma, AForkLeavesRegistrationsAsTheyWere) {
  open();
  const UniqueFd file = memory_file(kMiB);
  const Mapping segment(file.get(), kMiB, PROT_READ | PROT_WRITE);
  for (std::uint64_t i = 0; i < kMiB; ++i) segment.bytes[i] = byte_at(i);
  auto served = add(segment.bytes, MemoryUse::kServe, file.get());
  // Private memory: the kind that a fork copies on write.
  std::vector<std::byte> landing(kMiB);
  auto landed = add(landing, MemoryUse::kLand, -1);
  ASSERT_NE(landed->find(puller_device(), 0), nullptr) << problems(*landed);
  connect();
  int leash[2];
  ASSERT_EQ(::pipe(leash), 0);
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    ::close(leash[1]);
    char byte;
    std::fill(landing.begin(), landing.end(), std::byte{0xee});
    (void)!::read(leash[0], &byte, 1);  // until the parent is done
    ::_exit(0);
  }
  std::fill(landing.begin(), landing.end(), std::byte{0x11});  // the parent's pages move, if any do
  EXPECT_EQ(read(*served, 0, *landed, kMiB), IBV_WC_SUCCESS);
  std::uint64_t wrong = 0;
  for (std::uint64_t i = 0; i < kMiB; ++i) wrong += landing[i] != byte_at(i) ? 1 : 0;
  EXPECT_EQ(wrong, 0u);
  ::close(leash[1]);
  EXPECT_EQ(::waitpid(child, nullptr, 0), child);
  ::close(leash[0]);
  disconnect();
}

TEST_F(RegistrationRdma, HugePagesAreRegisteredAsTheyAre) {
  constexpr std::uint64_t kHuge = 2 * kMiB;
  std::ofstream("/proc/sys/vm/nr_hugepages") << 8;
  std::uint64_t pages = 0;
  std::ifstream("/proc/sys/vm/nr_hugepages") >> pages;
  if (pages < 4) {
    ASSERT_FALSE(rekindle::testing::rdma_cables_can_fail())
        << "the emulated machine has the memory";
    GTEST_SKIP() << "no huge pages here";
  }
  open();
  const UniqueFd file = memory_file(4 * kHuge, MFD_HUGETLB);
  const Mapping segment(file.get(), 4 * kHuge, PROT_READ | PROT_WRITE);
  for (const MemoryUse use : {MemoryUse::kServe, MemoryUse::kLand}) {
    auto memory = add(segment.bytes, use, file.get());
    EXPECT_EQ(problems(*memory), "");
    EXPECT_EQ(total(memory->pieces(source_device())), 4 * kHuge);
  }
}

}  // namespace
}  // namespace rekindle::transport::verbs
