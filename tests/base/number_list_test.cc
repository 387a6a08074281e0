#include "src/base/number_list.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace rekindle {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

TEST(NumberList, IsNumbersAndRangesInTheirOrder) {
  EXPECT_THAT(parse_number_list("0-2,8", 9), ElementsAre(0, 1, 2, 8));
  EXPECT_THAT(parse_number_list("5,1-1", 9), ElementsAre(5, 1));
  EXPECT_THAT(parse_number_list("", 9), IsEmpty());
}

TEST(NumberList, IsEmptyWhenAnythingIsWrong) {
  for (const char* text : {"9", "0-9", "2-1", "-1", "1,", ",1", "1 2", "0x1", "1-", "a"}) {
    EXPECT_THAT(parse_number_list(text, 9), IsEmpty()) << text;
  }
}

}  // namespace
}  // namespace rekindle
