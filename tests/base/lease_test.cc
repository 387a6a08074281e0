#include "src/base/lease.h"

#include <optional>

#include <gtest/gtest.h>

namespace rekindle {
namespace {

TEST(Lease, AnEmptyOneHoldsNothing) {
  LeaseGrantor grantor;
  const Lease empty;
  EXPECT_FALSE(empty);
  EXPECT_FALSE(grantor.held());
}

TEST(Lease, TheRightEndsWithItsLastCopy) {
  int freed = 0;
  LeaseGrantor grantor([&] { ++freed; });
  Lease first = grantor.grant();
  Lease copy = first;
  Lease second = grantor.grant();
  EXPECT_TRUE(first && copy && second);
  first.reset();
  second.reset();
  EXPECT_TRUE(grantor.held());
  EXPECT_EQ(freed, 0);
  copy.reset();
  EXPECT_FALSE(grantor.held());
  EXPECT_EQ(freed, 1);
}

TEST(Lease, TheGrantorIsFreeWhenItIsToldSo) {
  LeaseGrantor* told = nullptr;
  bool held = true;
  LeaseGrantor grantor([&] { held = told->held(); });
  told = &grantor;
  (void)grantor.grant();
  EXPECT_FALSE(held);
}

TEST(Lease, ItIsGrantedAgainAfterItEnded) {
  int freed = 0;
  LeaseGrantor grantor([&] { ++freed; });
  for (int i = 1; i <= 3; ++i) {
    { const Lease lease = grantor.grant(); }
    EXPECT_EQ(freed, i);
  }
}

TEST(Lease, ALeaseMayOutliveItsGrantor) {
  int freed = 0;
  std::optional<LeaseGrantor> grantor(std::in_place, [&] { ++freed; });
  Lease lease = grantor->grant();
  grantor.reset();
  lease.reset();
  EXPECT_EQ(freed, 0);
}

}  // namespace
}  // namespace rekindle
