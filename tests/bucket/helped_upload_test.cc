#include "src/bucket/helped_upload.h"

#include <cstring>
#include <random>

#include <gtest/gtest.h>

namespace rekindle::bucket {
namespace {

constexpr std::uint64_t kRoom = 4096;

// Rows at increasing places, as a plan makes them.
std::vector<Upload> random_copies(std::mt19937_64& random, const std::string& host) {
  const auto below = [&](std::uint64_t most) { return random() % most; };
  std::vector<Upload> copies;
  for (std::uint64_t at = below(20); at < kRoom / 2;) {
    Upload copy;
    copy.run_bytes = 1 + below(50);
    copy.rows = below(2) == 0 ? 1 : 1 + below(12);
    copy.to = at;
    if (copy.rows > 1) {
      copy.to_stride = copy.run_bytes + below(2) * below(30);
      copy.from_stride = copy.run_bytes + below(30);
    }
    copy.from = reinterpret_cast<const std::byte*>(host.data()) + below(1000);
    copies.push_back(copy);
    at += (copy.rows - 1) * copy.to_stride + copy.run_bytes + below(40);
  }
  return copies;
}

void run_copies(std::span<const Upload> copies, std::string& to) {
  for (const Upload& copy : copies) {
    for (std::uint64_t row = 0; row < copy.rows; ++row) {
      ASSERT_LE(copy.to + row * copy.to_stride + copy.run_bytes, to.size());
      std::memcpy(to.data() + copy.to + row * copy.to_stride, copy.from + row * copy.from_stride,
                  copy.run_bytes);
    }
  }
}

TEST(CutUploads, PartsHaveTheBytesOfTheWholeAndNoOthers) {
  for (std::uint64_t seed = 0; seed < 500; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937_64 random(seed);
    std::string host(3000, '\0');
    for (char& byte : host) byte = static_cast<char>(random() % 255 + 1);
    const auto copies = random_copies(random, host);
    std::string whole(kRoom, '\0');
    run_copies(copies, whole);
    std::string joined;
    while (joined.size() < kRoom) {
      const std::uint64_t begin = joined.size();
      const std::uint64_t end = std::min(kRoom, begin + 1 + random() % 600);
      std::vector<Upload> part;
      cut_uploads(copies, begin, end, part);
      std::string bytes(end - begin, '\0');
      run_copies(part, bytes);
      joined += bytes;
    }
    EXPECT_EQ(joined, whole);
  }
}

TEST(CutUploads, RowsThatAreWholeStayOneCopy) {
  const std::string host(1000, 'x');
  const Upload rows{reinterpret_cast<const std::byte*>(host.data()), 0, 10, 100, 10, 10};
  std::vector<Upload> part;
  cut_uploads({&rows, 1}, 105, 895, part);
  ASSERT_EQ(part.size(), 3u);
  EXPECT_EQ(part[2].rows, 78u);
  EXPECT_EQ(part[2].to, 5u);
}

}  // namespace
}  // namespace rekindle::bucket
