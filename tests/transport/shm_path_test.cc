// Reads of a neighbour's segments: placement, keys, sessions, truncation, descriptors.
#include <algorithm>
#include <cstring>
#include <thread>

#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <gtest/gtest.h>

#include "src/base/copy_bytes.h"
#include "src/base/numa_nodes.h"
#include "src/base/units.h"
#include "src/store/fault_guard.h"
#include "tests/support/thread_cpus.h"
#include "tests/transport/test_source.h"
#include "transport/shm/shm_protocol.h"
#include "transport/shm/shm_transport.h"
#include "transport/shm/source_mappings.h"

namespace rekindle::transport::testing {
namespace {

class ShmPathTest : public ::testing::Test, public TestSource<shm::ShmServer, shm::ServerOptions> {
 protected:
  ShmPathTest() : TestSource(shm::make_connector(), {}) {}
  std::unique_ptr<shm::ShmPath> connect(const SessionToken& token) {
    return std::unique_ptr<shm::ShmPath>(
        static_cast<shm::ShmPath*>(TestSource::connect(token).release()));
  }
};

// A file that has a name, and the region that a peer's reply describes.
class NamedFile {
 public:
  explicit NamedFile(std::size_t size) {
    std::string name = "/dev/shm/rekindle-test-XXXXXX";
    fd_ = UniqueFd(::mkstemp(name.data()));
    path_ = name;
    EXPECT_EQ(::ftruncate(fd_.get(), static_cast<off_t>(size)), 0);
  }
  ~NamedFile() { ::unlink(path_.c_str()); }
  NamedFile(const NamedFile&) = delete;
  NamedFile& operator=(const NamedFile&) = delete;

  std::shared_ptr<const shm::Mapping> open(shm::SourceMappings& mappings, std::uint64_t offset,
                                           std::uint64_t size) const {
    shm::RegionReply reply;
    reply.fd_offset = offset;
    reply.size_bytes = size;
    return mappings.open(fd_, reply);
  }
  void write(char byte) { EXPECT_EQ(::pwrite(fd_.get(), &byte, 1, 0), 1); }
  void rename_to(const std::string& path) {
    ASSERT_EQ(::rename(path_.c_str(), path.c_str()), 0);
    path_ = path;
  }
  const std::string& path() const { return path_; }

 private:
  UniqueFd fd_;
  std::string path_;
};

TEST(ShmSourceMappings, AMappingStaysForTheNextUseAlsoUnderAnotherName) {
  shm::SourceMappings mappings;
  NamedFile file(kMiB);
  const auto* first = file.open(mappings, 0, kMiB)->bytes().data();
  EXPECT_EQ(mappings.size(), 1u);
  file.rename_to(file.path() + "-renamed");
  file.write('n');
  const auto again = file.open(mappings, 0, kMiB);
  EXPECT_EQ(again->bytes().data(), first);
  EXPECT_EQ(again->bytes()[0], std::byte{'n'});
  // Another region of the file is another mapping.
  EXPECT_NE(file.open(mappings, kMiB / 2, kMiB / 2), nullptr);
  EXPECT_EQ(mappings.size(), 2u);
}

// Or the memory of the file would not be freed.
TEST(ShmSourceMappings, AFileThatLosesItsNameIsNotKept) {
  shm::SourceMappings mappings;
  NamedFile file(kMiB);
  NamedFile other(kMiB);
  const auto in_use = file.open(mappings, 0, kMiB);
  file.open(mappings, 0, kMiB / 2).reset();
  other.open(mappings, 0, kMiB).reset();
  ASSERT_EQ(mappings.size(), 3u);
  ASSERT_EQ(::unlink(file.path().c_str()), 0);
  EXPECT_TRUE(eventually([&] { return mappings.size() == 1; }));
  // Its user reads on.
  file.write('u');
  EXPECT_EQ(in_use->bytes()[0], std::byte{'u'});
  EXPECT_NE(file.open(mappings, 0, kMiB), nullptr);
  EXPECT_EQ(mappings.size(), 1u);
}

TEST(ShmSourceMappings, AMappingThatNobodyUsesGoesAfterAWhile) {
  shm::SourceMappings mappings(std::chrono::milliseconds(1));
  NamedFile file(kMiB);
  NamedFile used(kMiB);
  const auto in_use = used.open(mappings, 0, kMiB);
  for (std::uint64_t i = 0; i < 4; ++i) file.open(mappings, i * kPageBytes, kPageBytes).reset();
  EXPECT_TRUE(eventually([&] { return mappings.size() == 1; }));
  EXPECT_EQ(used.open(mappings, 0, kMiB), in_use);
}

TEST(ShmSourceMappings, ARegionBehindTheEndOfTheFileIsNotMappedThoughItWas) {
  shm::SourceMappings mappings;
  NamedFile file(kMiB);
  ASSERT_NE(file.open(mappings, 0, kMiB), nullptr);
  ASSERT_EQ(::truncate(file.path().c_str(), kMiB / 2), 0);
  EXPECT_EQ(file.open(mappings, 0, kMiB), nullptr);
}

TEST_F(ShmPathTest, AReadLandsByteForByteAlsoFromTheMiddleOfAFile) {
  const TestSegment segment(9 * kMiB + 123);
  const RegionKey whole = add(segment);
  const std::uint64_t skip = 4096 * 3 + 104;  // as behind a safetensors header
  const RegionKey middle =
      registry_.add(segment.bytes().subspan(skip), segment.fd(), skip, {}, nullptr);
  const auto path = connect(admit({whole, middle}));
  std::vector<std::byte> local(segment.bytes().size());
  ASSERT_EQ(
      read_one(*path,
               {.wr_id = 5, .remote = whole, .local = local.data(), .run_bytes = local.size()}),
      OpStatus::kOk);
  EXPECT_EQ(std::memcmp(local.data(), segment.bytes().data(), local.size()), 0);
  EXPECT_EQ(path->bytes_landed(), local.size());
  ASSERT_EQ(
      read_one(
          *path,
          {.wr_id = 6, .remote = middle, .local = local.data(), .run_bytes = local.size() - skip}),
      OpStatus::kOk);
  EXPECT_EQ(std::memcmp(local.data(), segment.bytes().data() + skip, local.size() - skip), 0);
}

TEST_F(ShmPathTest, TheCopyThreadKeepsToTheCpusOfThePoller) {
  const TestSegment segment(1 * kMiB);
  const RegionKey key = add(segment);
  const auto path = connect(admit({key}));
  std::vector<std::byte> local(4096);
  const std::vector<int> last = {allowed_cpus().back()};
  std::thread([&] {
    keep_thread_to(last);
    EXPECT_EQ(read_one(*path, {.remote = key, .local = local.data(), .run_bytes = 4096}),
              OpStatus::kOk);
  }).join();
  const auto threads = rekindle::testing::cpus_of_threads();
  const auto copier = threads.find("rk-shm-copy");
  ASSERT_NE(copier, threads.end());
  EXPECT_EQ(copier->second, last);
}

TEST(ShmCopy, EqualsMemcpyAtEveryAlignmentAndSize) {
  const std::uint64_t seed = std::random_device{}();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  std::mt19937_64 random(seed);
  std::vector<std::byte> from(1 << 20);
  for (auto& byte : from) byte = static_cast<std::byte>(random());
  for (int round = 0; round < 400; ++round) {
    const std::size_t size = round % 2 == 0 ? random() % (600 << 10) : random() % 300;
    const std::size_t at = random() % 200;
    const std::size_t to_at = random() % 200;
    std::vector<std::byte> to(to_at + size + 64, std::byte{0x5a});
    auto expected = to;
    std::memcpy(expected.data() + to_at, from.data() + at, size);
    copy_bytes(to.data() + to_at, from.data() + at, size);
    ASSERT_EQ(to, expected) << "size " << size << " from " << at << " to " << to_at;
  }
}

TEST_F(ShmPathTest, AMappedRegionIsStaleFromTheMomentItIsRemoved) {
  const TestSegment segment(1 * kMiB);
  const RegionKey first = add(segment);
  const RegionKey second = add(segment);
  const RegionKey foreign = add(segment);
  const auto path = connect(admit({first, second}));
  std::vector<std::byte> local(4096);
  const auto read = [&](RegionKey key) {
    return read_one(*path, {.remote = key, .local = local.data(), .run_bytes = 4096});
  };
  EXPECT_EQ(read(first), OpStatus::kOk);
  EXPECT_EQ(read(second), OpStatus::kOk);
  EXPECT_EQ(read(foreign), OpStatus::kDenied);
  EXPECT_EQ(registry_.reader_count(first), 1u);
  registry_.remove(first);
  EXPECT_EQ(read(first), OpStatus::kStale);
  EXPECT_EQ(registry_.reader_count(first), 0u);
  EXPECT_EQ(read(second), OpStatus::kOk);
  const RegionKey successor = add(segment);
  ASSERT_EQ(successor.region, first.region);
  EXPECT_EQ(read(first), OpStatus::kStale);
  EXPECT_EQ(read(successor), OpStatus::kDenied);
}

TEST_F(ShmPathTest, ARegionWithoutAFileIsAFault) {
  std::vector<std::byte> heap(4096);
  const RegionKey key = registry_.add(heap, -1, 0, {}, nullptr);
  const auto path = connect(admit({key}));
  std::vector<std::byte> local(4096);
  EXPECT_EQ(read_one(*path, {.remote = key, .local = local.data(), .run_bytes = 4096}),
            OpStatus::kFault);
}

TEST_F(ShmPathTest, AFileTruncatedUnderTheMappingIsAFaultAndNoCrash) {
  TestSegment segment(8 * kMiB);
  const RegionKey key = add(segment);
  const auto path = connect(admit({key}));
  std::vector<std::byte> local(8 * kMiB);
  ASSERT_EQ(read_one(*path, {.remote = key, .local = local.data(), .run_bytes = 4096}),
            OpStatus::kOk);  // mapped
  segment.truncate(1 * kMiB);
  EXPECT_EQ(read_one(*path, {.remote = key, .local = local.data(), .run_bytes = 8 * kMiB}),
            OpStatus::kFault);
  EXPECT_EQ(read_one(*path, {.remote = key, .local = local.data(), .run_bytes = 1 * kMiB}),
            OpStatus::kOk);
}

TEST_F(ShmPathTest, AFileThatIsTooShortIsNotMapped) {
  TestSegment segment(8 * kMiB);
  const RegionKey key = add(segment);
  segment.truncate(1 * kMiB);
  const auto path = connect(admit({key}));
  std::vector<std::byte> local(4096);
  EXPECT_EQ(read_one(*path, {.remote = key, .local = local.data(), .run_bytes = 4096}),
            OpStatus::kFault);
}

TEST_F(ShmPathTest, MapHandsTheRegionItselfOver) {
  const TestSegment segment(1 * kMiB);
  const RegionKey key = add(segment);
  const auto path = connect(admit({key}));
  const auto mapped = path->map(key, test_deadline());
  ASSERT_TRUE(mapped) << mapped.error().message();
  ASSERT_EQ(mapped->size(), segment.bytes().size());
  EXPECT_NE(mapped->data(), segment.bytes().data());
  EXPECT_EQ(std::memcmp(mapped->data(), segment.bytes().data(), mapped->size()), 0);
  registry_.remove(key);
  EXPECT_EQ(path->map(key, test_deadline()).error().code(), ErrorCode::kStale);
  EXPECT_EQ(std::memcmp(mapped->data(), segment.bytes().data(), mapped->size()), 0);
}

TEST_F(ShmPathTest, AReaderCannotWriteThroughWhatItGets) {
  const TestSegment segment(64 * kKiB);
  const RegionKey key = add(segment);
  const SessionToken token = admit({key});
  const auto endpoint = shm::Endpoint::parse(server_->endpoint("")).value();
  const UniqueFd socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, endpoint.socket_name.data(), endpoint.socket_name.size());
  ASSERT_EQ(::connect(socket.get(), reinterpret_cast<sockaddr*>(&address),
                      static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 +
                                             endpoint.socket_name.size())),
            0);
  const auto receive = [&](auto& message) {
    UniqueFd fd;
    shm::Io io = shm::Io::kAgain;
    EXPECT_TRUE(eventually([&] {
      io = shm::receive_message(socket.get(), message, fd);
      return io != shm::Io::kAgain;
    }));
    EXPECT_EQ(io, shm::Io::kDone);
    return fd;
  };
  ASSERT_EQ(shm::send_message(socket.get(),
                              shm::ClientHello{.token = token, .incarnation = incarnation_}),
            shm::Io::kDone);
  shm::ServerHello hello;
  const UniqueFd counter = receive(hello);
  ASSERT_EQ(hello.status, HelloStatus::kOk);
  ASSERT_EQ(shm::send_message(socket.get(), shm::RegionRequest{.key = key, .want_fd = 1}),
            shm::Io::kDone);
  shm::RegionReply reply;
  const UniqueFd file = receive(reply);
  for (const UniqueFd* fd : {&counter, &file}) {
    ASSERT_TRUE(*fd);
    EXPECT_EQ(::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd->get(), 0), MAP_FAILED);
    EXPECT_EQ(::pwrite(fd->get(), "x", 1, 0), -1);
    EXPECT_NE(::ftruncate(fd->get(), 0), 0);
  }
}

TEST_F(ShmPathTest, AnotherIncarnationIsStaleAndAnUnknownTokenIsDenied) {
  const TestSegment segment(4096);
  const SessionToken token = admit({add(segment)});
  PathTarget wrong = target(token);
  wrong.incarnation = Incarnation::random();
  EXPECT_EQ(connector_->connect(wrong, test_deadline()).error().code(), ErrorCode::kStale);
  EXPECT_EQ(try_connect(SessionToken::random()).error().code(), ErrorCode::kDenied);
  PathTarget elsewhere = target(token);
  elsewhere.endpoint = "00000000-0000-0000-0000-000000000000/rekindle-x";
  EXPECT_EQ(connector_->connect(elsewhere, test_deadline()).error().code(),
            ErrorCode::kUnavailable);
  elsewhere.endpoint = shm::Endpoint{shm::host_boot_id().value(), "rekindle-nobody"}.to_string();
  EXPECT_EQ(connector_->connect(elsewhere, test_deadline()).error().code(),
            ErrorCode::kUnavailable);
  for (const char* bad : {"", "x", "/", "a/", "/b"}) {
    elsewhere.endpoint = bad;
    EXPECT_EQ(connector_->connect(elsewhere, test_deadline()).error().code(), ErrorCode::kInvalid);
  }
}

TEST_F(ShmPathTest, ARevokedSessionLetsGoOfTheMemoryBeforeTheDropReturns) {
  const TestSegment segment(16 * kMiB);
  const RegionKey key = add(segment);
  const SessionToken revoked = admit({key});
  const SessionToken other = admit({key});
  const auto victim = connect(revoked);
  const auto idle_victim = connect(revoked);
  const auto bystander = connect(other);
  std::vector<std::byte> local(16 * kMiB);
  ASSERT_EQ(read_one(*idle_victim, {.remote = key, .local = local.data(), .run_bytes = 4096}),
            OpStatus::kOk);
  std::vector<ReadOp> ops;
  for (std::size_t i = 0; i < 200; ++i) {
    ops.push_back({.wr_id = i, .remote = key, .local = local.data(), .run_bytes = local.size()});
  }
  ASSERT_EQ(victim->post(ops).value(), ops.size());
  std::vector<Completion> early(1);
  ASSERT_TRUE(eventually([&] { return victim->poll(early) == 1; }));
  registry_.revoke(revoked);
  server_->drop_session(revoked);
  EXPECT_EQ(registry_.reader_count(key), 0u);
  auto completions = drain(*victim);
  completions.insert(completions.begin(), early[0]);
  EXPECT_EQ(sorted_ids(completions), first_ids(200));
  EXPECT_NE(completions.back().status, OpStatus::kOk);
  EXPECT_EQ(victim->post(ops).error().code(), ErrorCode::kPeerLost);
  EXPECT_TRUE(eventually([&] { return !idle_victim->post({}).has_value(); }));
  EXPECT_EQ(read_one(*bystander, {.remote = key, .local = local.data(), .run_bytes = 4096}),
            OpStatus::kOk);
}

TEST_F(ShmPathTest, AbortEndsEveryOpAndNothingLandsAfterIt) {
  const TestSegment segment(16 * kMiB);
  const RegionKey key = add(segment);
  const auto path = connect(admit({key}));
  std::vector<std::byte> local(16 * kMiB);
  std::vector<ReadOp> ops;
  for (std::size_t i = 0; i < 256; ++i) {
    ops.push_back({.wr_id = i, .remote = key, .local = local.data(), .run_bytes = local.size()});
  }
  ASSERT_EQ(path->post(ops).value(), ops.size());
  EXPECT_EQ(path->post(ops).value(), 0u) << "full";
  path->abort();
  path->abort();
  const auto completions = drain(*path);
  EXPECT_EQ(sorted_ids(completions), first_ids(256));
  EXPECT_EQ(completions.back().status, OpStatus::kAborted);
  std::fill(local.begin(), local.end(), std::byte{1});
  const std::uint64_t landed = path->bytes_landed();
  ::usleep(20'000);
  EXPECT_EQ(path->bytes_landed(), landed);
  EXPECT_TRUE(
      std::all_of(local.begin(), local.end(), [](std::byte b) { return b == std::byte{1}; }));
  EXPECT_EQ(path->post(ops).error().code(), ErrorCode::kPeerLost);
}

TEST_F(ShmPathTest, AServerThatEndsLeavesEveryOpReported) {
  const TestSegment segment(16 * kMiB);
  const RegionKey key = add(segment);
  const auto path = connect(admit({key}));
  std::vector<std::byte> local(16 * kMiB);
  std::vector<ReadOp> ops;
  for (std::size_t i = 0; i < 200; ++i) {
    ops.push_back({.wr_id = i, .remote = key, .local = local.data(), .run_bytes = local.size()});
  }
  ASSERT_EQ(path->post(ops).value(), ops.size());
  server_.reset();
  const auto completions = drain(*path);
  EXPECT_EQ(sorted_ids(completions), first_ids(200));
  EXPECT_EQ(completions.back().status, OpStatus::kPeerLost);
  EXPECT_EQ(path->post(ops).error().code(), ErrorCode::kPeerLost);
}

TEST_F(ShmPathTest, SilentAndGarbledConnectionsAreClosed) {
  serve({.hello_timeout = 100ms});
  const TestSegment segment(4096);
  const RegionKey key = add(segment);
  const auto endpoint = shm::Endpoint::parse(server_->endpoint("")).value();
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, endpoint.socket_name.data(), endpoint.socket_name.size());
  const auto length =
      static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + endpoint.socket_name.size());
  for (const std::size_t size : {0ul, 1ul, 47ul, 48ul, 49ul, 5000ul}) {
    const UniqueFd socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    ASSERT_EQ(::connect(socket.get(), reinterpret_cast<sockaddr*>(&address), length), 0);
    const std::vector<std::byte> garbage(size, std::byte{0x7f});
    if (size != 0) ::send(socket.get(), garbage.data(), size, MSG_NOSIGNAL);
    std::byte end{};
    pollfd entry{socket.get(), POLLIN, 0};
    ASSERT_EQ(::poll(&entry, 1, 20'000), 1) << size;
    EXPECT_LE(::recv(socket.get(), &end, 1, 0), 0) << size;
  }
  const auto path = connect(admit({key}));
  std::vector<std::byte> local(4096);
  EXPECT_EQ(read_one(*path, {.remote = key, .local = local.data(), .run_bytes = 4096}),
            OpStatus::kOk);
}

}  // namespace
}  // namespace rekindle::transport::testing
