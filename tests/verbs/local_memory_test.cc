// Memory that reads land in: what stays registered between two uses, and how long.
#include "transport/verbs/memory/local_memory.h"

#include <memory>
#include <utility>

#include <gtest/gtest.h>

#include "tests/support/process.h"
#include "tests/verbs/registrar_fixture.h"

namespace rekindle::transport::verbs {
namespace {

class LocalMemoryTest : public RegistrarFixture {
 protected:
  void open(bool keeps = true) {
    RegistrarFixture::open({.max_piece_bytes = 2 * kMiB, .keeps_idle_memory = keeps});
    memory_ = std::make_shared<LocalMemory>(*registrar);
  }
  void TearDown() override { memory_.reset(); }

  // Returns when all of it is registered.
  std::shared_ptr<const void> use(std::span<std::byte> bytes,
                                  std::shared_ptr<MemoryLife> life = nullptr) {
    if (life != nullptr) memory_->prepare(bytes, life, soon());
    auto used = memory_->add(bytes, std::move(life));
    EXPECT_TRUE(reaches(names.size() * bytes.size()));
    return used;
  }
  bool reaches(std::uint64_t bytes) {
    return rekindle::testing::eventually([&] { return registrar->stats().bytes == bytes; });
  }
  // Whether a poller finds the address, as a piece with this key.
  std::uint32_t key_of(const std::byte* address) {
    LocalMemoryView view(memory_, device());
    view.refresh();
    return view.find(address).lkey;
  }
  std::uint64_t registrations() { return network.calls(FakeCall::kRegMr); }

  const MappedFile file_{4 * kMiB, PROT_READ | PROT_WRITE};
  std::shared_ptr<LocalMemory> memory_;
};

TEST_F(LocalMemoryTest, WithoutALifeARegistrationEndsWithItsUse) {
  open();
  auto used = use(file_.bytes);
  EXPECT_NE(key_of(file_.bytes.data()), 0u);
  used.reset();
  EXPECT_EQ(registrar->stats().bytes, 0u);
  EXPECT_EQ(key_of(file_.bytes.data()), 0u);
}

TEST_F(LocalMemoryTest, TheNextUseOfTheSameMemoryRegistersNothing) {
  open();
  auto life = std::make_shared<MemoryLife>();
  auto used = use(file_.bytes, life);
  const std::uint64_t made = registrations();
  const std::uint32_t key = key_of(file_.bytes.data());
  for (int round = 0; round < 3; ++round) {
    used.reset();
    EXPECT_EQ(registrar->stats().bytes, names.size() * file_.bytes.size());
    // Nobody reads into it meanwhile.
    EXPECT_EQ(key_of(file_.bytes.data()), 0u);
    used = use(file_.bytes, life);
    EXPECT_EQ(key_of(file_.bytes.data()), key);
  }
  EXPECT_EQ(registrations(), made);
  used.reset();
  life.reset();
  EXPECT_TRUE(reaches(0));
}

TEST_F(LocalMemoryTest, AUseKeepsTheLifeFromEnding) {
  open();
  auto life = std::make_shared<MemoryLife>();
  bool ended = false;
  life->at_end([&] { ended = true; });
  auto used = use(file_.bytes, life);
  life.reset();
  EXPECT_FALSE(ended);
  used.reset();
  EXPECT_TRUE(ended);
  EXPECT_TRUE(reaches(0));
}

TEST_F(LocalMemoryTest, PreparedMemoryIsThereForItsFirstUse) {
  open();
  const auto life = std::make_shared<MemoryLife>();
  memory_->prepare(file_.bytes, life, soon());
  const std::uint64_t made = registrations();
  EXPECT_EQ(registrar->stats().bytes, names.size() * file_.bytes.size());
  EXPECT_EQ(key_of(file_.bytes.data()), 0u);
  const auto used = use(file_.bytes, life);
  EXPECT_NE(key_of(file_.bytes.data()), 0u);
  EXPECT_EQ(registrations(), made);
}

TEST_F(LocalMemoryTest, AnotherSizeAtTheSameAddressIsRegisteredAnew) {
  open();
  const auto life = std::make_shared<MemoryLife>();
  use(file_.bytes, life).reset();
  const std::uint64_t made = registrations();
  const auto used = use(file_.bytes.first(2 * kMiB), life);
  EXPECT_GT(registrations(), made);
  EXPECT_EQ(registrar->stats().bytes, names.size() * 2 * kMiB);
}

// The rest would never be registered.
TEST_F(LocalMemoryTest, AnIncompleteRegistrationIsNotKept) {
  change([](FakeDevice& device) { device.max_registered_bytes = 2 * kMiB; });
  open();
  const auto life = std::make_shared<MemoryLife>();
  memory_->prepare(file_.bytes, life, soon());
  EXPECT_GE(registrar->stats().failures, names.size());
  EXPECT_EQ(registrar->stats().bytes, 0u);
}

// Others need the room below the limit.
TEST_F(LocalMemoryTest, WhereThisProcessMayPinOnlySoMuchNothingIsKept) {
  open(false);
  const auto life = std::make_shared<MemoryLife>();
  use(file_.bytes, life).reset();
  EXPECT_EQ(registrar->stats().bytes, 0u);
  memory_->prepare(file_.bytes, life, soon());
  EXPECT_EQ(registrar->stats().bytes, 0u);
}

TEST_F(LocalMemoryTest, ALifeMayOutliveTheTransport) {
  open();
  auto life = std::make_shared<MemoryLife>();
  use(file_.bytes, life).reset();
  memory_.reset();
  EXPECT_EQ(registrar->stats().bytes, 0u);
  life.reset();
}

}  // namespace
}  // namespace rekindle::transport::verbs
