#include <atomic>

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <unistd.h>

#include <gtest/gtest.h>

#include "src/ipc/life.h"
#include "src/ipc/life_signs.h"
#include "tests/ipc/socket_pair.h"

namespace rekindle::ipc {
namespace {

std::unique_ptr<LifePage> open_copy(const LifePage& page) {
  auto opened = LifePage::open(UniqueFd(::dup(page.fd())));
  return opened ? std::move(*opened) : nullptr;
}

std::uint32_t value(const LifePage& page) { return std::atomic_ref(*page.word()).load(); }

TEST(LifePage, BothEndsSeeOneWord) {
  auto page = LifePage::create();
  ASSERT_TRUE(page) << page.error().message();
  const auto other = open_copy(**page);
  ASSERT_TRUE(other);
  std::atomic_ref(*(*page)->word()).store(7);
  EXPECT_EQ(value(*other), 7u);
}

TEST(LifePage, NobodyCanCutItUnderTheAgent) {
  auto page = LifePage::create();
  ASSERT_TRUE(page);
  EXPECT_NE(::ftruncate((*page)->fd(), 0), 0);
  EXPECT_NE(::ftruncate((*page)->fd(), 1 << 20), 0);
}

TEST(LifePage, OtherFilesAreRefused) {
  testing::Pipe pipe = testing::make_pipe();
  EXPECT_EQ(LifePage::open(std::move(pipe.read)).error().code(), ErrorCode::kInvalid);
  UniqueFd open(::memfd_create("open", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_EQ(::ftruncate(open.get(), kLifePageBytes), 0);
  EXPECT_EQ(LifePage::open(UniqueFd(::dup(open.get()))).error().code(), ErrorCode::kInvalid);
  ASSERT_EQ(::fcntl(open.get(), F_ADD_SEALS, F_SEAL_SHRINK), 0);
  EXPECT_EQ(LifePage::open(std::move(open)).error().code(), ErrorCode::kInvalid) << "no magic";
}

TEST(LifeHold, HoldsUntilItLetsGo) {
  auto page = LifePage::create();
  ASSERT_TRUE(page);
  {
    auto hold = LifeHold::start(open_copy(**page));
    ASSERT_TRUE(hold) << hold.error().message();
    const std::uint32_t held = value(**page);
    EXPECT_NE(held & FUTEX_TID_MASK, 0u);
    EXPECT_EQ(held & FUTEX_OWNER_DIED, 0u);
    EXPECT_EQ(LifeHold::start(open_copy(**page)).error().code(), ErrorCode::kUnavailable)
        << "one holder at a time";
  }
  EXPECT_EQ(value(**page), 0u);
}

TEST(LifeSigns, ReadsTheLineOfACoreDump) {
  EXPECT_TRUE(says_core_dumping("Name:\tx\nCoreDumping:\t1\nTHP_enabled:\t1\n"));
  EXPECT_FALSE(says_core_dumping("Name:\tx\nCoreDumping:\t0\nTHP_enabled:\t1\n"));
  EXPECT_FALSE(says_core_dumping("Name:\tCoreDumping:\t1\n")) << "a process may have any name";
  EXPECT_FALSE(says_core_dumping(""));
}

TEST(LifeWatch, RefusesANumberThatItKnows) {
  auto watch = LifeWatch::start([](const Death&) {});
  ASSERT_TRUE(watch);
  ASSERT_TRUE((*watch)->add(1, std::move(*LifePage::create()), {}));
  EXPECT_EQ((*watch)->add(1, std::move(*LifePage::create()), {}).error().code(),
            ErrorCode::kInvalid);
  EXPECT_EQ((*watch)->size(), 1u);
  (*watch)->remove(1);
  (*watch)->remove(1);
  EXPECT_EQ((*watch)->size(), 0u);
}

}  // namespace
}  // namespace rekindle::ipc
