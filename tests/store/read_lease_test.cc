// Whether a read lease tells, at any time, that nobody can have written to a file; and what a
// copy's state makes of it. The writers are processes of their own, as strangers are.
#include "src/store/read_lease.h"

#include <csignal>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "src/base/unique_fd.h"
#include "tests/store/store_fixture.h"

namespace rekindle::store {
namespace {

using ::testing::HasSubstr;

constexpr std::size_t kMapped = 4096;

// A process that maps the file for writing and reads its last page. It then stores a byte, or lets
// go of the file, when it is told to.
class Stranger {
 public:
  explicit Stranger(const fs::path& path) {
    int orders[2];
    int answers[2];
    if (::pipe(orders) != 0 || ::pipe(answers) != 0) throw std::runtime_error("pipe");
    process_ = ::fork();
    if (process_ == 0) {
      ::close(orders[1]);
      act(path, orders[0], answers[1]);
      ::_exit(0);
    }
    ::close(orders[0]);
    ::close(answers[1]);
    orders_ = orders[1];
    answers_ = answers[0];
    wait_for_answer();
  }
  ~Stranger() {
    ::close(orders_);
    ::close(answers_);
    ::waitpid(process_, nullptr, 0);
  }
  Stranger(const Stranger&) = delete;
  Stranger& operator=(const Stranger&) = delete;

  void store() { order('s'); }
  void let_go() { order('g'); }

 private:
  static void act(const fs::path& path, int orders, int answers) {
    const int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
    const auto size = fs::file_size(path) / kMapped * kMapped;
    void* const mapped = ::mmap(nullptr, kMapped, PROT_READ | PROT_WRITE, MAP_SHARED, fd,
                                static_cast<off_t>(size - kMapped));
    ::close(fd);
    volatile char* const byte = static_cast<char*>(mapped);
    char seen = *byte;
    char what = 'o';
    do {
      if (what == 's') *byte = static_cast<char>(seen + 1);
      if (what == 'g') ::munmap(mapped, kMapped);
      if (::write(answers, &what, 1) != 1) return;
    } while (::read(orders, &what, 1) == 1);
  }
  void order(char what) {
    EXPECT_EQ(::write(orders_, &what, 1), 1);
    wait_for_answer();
  }
  void wait_for_answer() {
    char answer = 0;
    EXPECT_EQ(::read(answers_, &answer, 1), 1);
  }

  pid_t process_ = -1;
  int orders_ = -1;
  int answers_ = -1;
};

class ReadLeaseTest : public StoreTest {
 protected:
  void reopen_with(const StoreOptions& options) {
    store_.reset();
    auto store = SegmentStore::open(options);
    ASSERT_TRUE(store) << store.error().message();
    store_ = std::move(*store);
  }
};

TEST_F(ReadLeaseTest, IsGivenOnlyWhileNobodyMayWriteAndEndsWithTheFirstWhoCan) {
  const fs::path path = temp_.path() / "file";
  write_bytes(path, std::string(4 * kMapped, 'x'));
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  auto first = ReadLease::take(fd);
  ASSERT_TRUE(first) << first.error().message();
  EXPECT_TRUE((*first)->held());
  {
    Stranger stranger(path);  // would be held up for 45 s if nobody ended the lease
    EXPECT_FALSE((*first)->held());
    const auto refused = ReadLease::take(fd);
    ASSERT_FALSE(refused);
    EXPECT_EQ(refused.error().code(), ErrorCode::kUnavailable);
    stranger.let_go();
    auto second = ReadLease::take(fd);
    ASSERT_TRUE(second) << second.error().message();
    EXPECT_TRUE((*second)->held());
    EXPECT_FALSE((*first)->held()) << "what was broken stays so";
    EXPECT_NE((*second)->number(), (*first)->number());
  }
  ::close(fd);
}

TEST_F(ReadLeaseTest, ReadersDoNotEndIt) {
  const fs::path path = temp_.path() / "file";
  write_bytes(path, std::string(4 * kMapped, 'x'));
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  auto lease = ReadLease::take(fd);
  ASSERT_TRUE(lease);
  EXPECT_EQ(read_bytes(path).size(), 4 * kMapped);
  fs::rename(path, temp_.path() / "renamed");
  fs::remove(temp_.path() / "renamed");
  EXPECT_TRUE((*lease)->held());
  ::close(fd);
}

TEST_F(ReadLeaseTest, TheFileSystemOfTheTestsHasThem) {
  const auto can = check_read_leases(temp_.path());
  EXPECT_TRUE(can) << can.error().message();
}

TEST_F(ReadLeaseTest, AnUnreadableDirectoryIsNamedByItsError) {
  EXPECT_FALSE(check_read_leases(temp_.path() / "nowhere"));
}

// The hole that stamps leave on tmpfs: a page that was read through a writable mapping is written
// to without any change of ctime.
TEST_F(ReadLeaseTest, B1AStoreThatLeavesNoTraceInTheStampsIsSeen) {
  const auto copy = pull(all_boxes(*checkpoint()));
  Verification& verification = *copy->verification;
  ASSERT_EQ(verification.state(), CopyState::kVerified);
  const auto& segment = copy->segments[0];
  const FileStamp before = *segment->stamp();
  Stranger stranger(segment->path());
  EXPECT_EQ(verification.state(), CopyState::kUnverified) << "before a byte can change";
  stranger.store();
  ASSERT_TRUE(*segment->stamp() == before) << "the stamps show nothing, or this test shows nothing";

  // As long as the mapping is there, no digest says anything about the next moment.
  const auto during = verification.stamp();
  ASSERT_FALSE(during);
  EXPECT_EQ(during.error().code(), ErrorCode::kUnavailable);
  EXPECT_THAT(during.error().message(), HasSubstr(segment->path().string()));
  stranger.let_go();
  const auto after = verification.stamp();
  ASSERT_TRUE(after) << after.error().message();
  EXPECT_FALSE(verify_version(*copy, 2, nullptr)) << "the byte is wrong";
  EXPECT_EQ(verification.state(), CopyState::kUnverified);
}

TEST_F(ReadLeaseTest, WhatIsVerifiedWhileSomebodyMayWriteIsNotRecorded) {
  const auto copy = pull(all_boxes(*checkpoint()));
  Verification& verification = *copy->verification;
  const auto before = verification.stamp();
  ASSERT_TRUE(before);
  {
    Stranger stranger(copy->segments[0]->path());
    EXPECT_FALSE(verification.record(*before));
    stranger.let_go();
  }
  EXPECT_FALSE(verification.record(*before)) << "somebody could write in between";
  const auto again = verification.stamp();
  ASSERT_TRUE(again);
  EXPECT_TRUE(verification.record(*again));
  EXPECT_EQ(verification.state(), CopyState::kVerified);
}

TEST_F(ReadLeaseTest, APullWhoseFilesAStrangerMayWriteToIsCommittedButNotVerified) {
  auto pending = begin(all_boxes(*checkpoint()));
  // In this process: one that was forked from it would keep the store's own descriptors, too.
  UniqueFd stranger(::open(pending->mapped(0)->path().c_str(), O_RDWR | O_CLOEXEC));
  fill_all(*pending, *source_);
  const auto copy = store_->commit(std::move(pending));
  ASSERT_TRUE(copy) << copy.error().message();
  EXPECT_EQ((*copy)->verification->state(), CopyState::kUnverified);
  stranger.reset();
  const auto now = (*copy)->verification->stamp();
  EXPECT_TRUE(now) << now.error().message();
}

TEST_F(ReadLeaseTest, AFileThatWasLentForWritingIsJudgedByItsStamps) {
  const auto copy = pull(all_boxes(*checkpoint()));
  const auto& segment = copy->segments[0];
  segment->lend_for_writing();
  EXPECT_EQ(copy->verification->state(), CopyState::kVerified) << "nobody has it open yet";
  Stranger trusted(segment->path());
  const auto stamps = copy->verification->stamp();
  ASSERT_TRUE(stamps) << stamps.error().message();
  EXPECT_EQ(stamps->front().lease, 0u);
  EXPECT_TRUE(copy->verification->record(*stamps));
  EXPECT_EQ(copy->verification->state(), CopyState::kVerified);
}

TEST_F(ReadLeaseTest, AStoreThatShallNotUseThemHasNone) {
  reopen_with({.directory = store_path(), .evidence = Evidence::kStamps});
  const auto copy = pull(all_boxes(*checkpoint()));
  EXPECT_EQ(copy->verification->stamp()->front().lease, 0u);
  Stranger trusted(copy->segments[0]->path());
  EXPECT_EQ(copy->verification->state(), CopyState::kVerified);
}

// The files of a copy that is gone are written to anew.
TEST_F(ReadLeaseTest, EndsWithTheCopy) {
  reopen_with({.directory = store_path(), .pool_bytes = 1 << 30});
  auto copy = pull(all_boxes(*checkpoint()));
  const auto inode = copy->segments[0]->stamp()->inode;
  copy.reset();
  ASSERT_TRUE(store_->retire(id_));
  copy = pull(all_boxes(*checkpoint()));
  EXPECT_EQ(copy->segments[0]->stamp()->inode, inode);
  EXPECT_EQ(copy->verification->state(), CopyState::kVerified);
  EXPECT_NE(copy->verification->stamp()->front().lease, 0u);
}

}  // namespace
}  // namespace rekindle::store
