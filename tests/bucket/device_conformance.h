#pragma once

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <ostream>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include <fcntl.h>
#include <sys/mman.h>

#include <gtest/gtest.h>

#include "src/base/blake3.h"
#include "src/bucket/block_digests.h"
#include "tests/bucket/device_child.h"
#include "tests/cuda/random_boxes.h"
#include "tests/support/must.h"

// What every Device promises (src/bucket/device.h), for any backend: include this in one source
// file per backend, instantiate DeviceConformance with it, and let main() run run_child().
namespace rekindle::bucket::testing {

struct DeviceBackend {
  std::string name;
  std::function<Result<std::unique_ptr<Device>>()> make;
  friend void PrintTo(const DeviceBackend& what, std::ostream* out) { *out << what.name; }
};

inline TimePoint soon() { return SteadyClock().now() + std::chrono::seconds(20); }

class DeviceConformance : public ::testing::TestWithParam<DeviceBackend> {
 protected:
  void SetUp() override {
    auto made = GetParam().make();
    if (made) {
      device_ = std::move(*made);
      stream_ = must(device_->make_stream());
      return;
    }
    if (std::getenv("REKINDLE_REQUIRE_GPU") != nullptr) FAIL() << made.error().message();
    GTEST_SKIP() << made.error().message();
  }

  std::unique_ptr<Memory> filled(const std::vector<std::byte>& bytes) {
    auto memory = must(device_->allocate(bytes.size()));
    const Upload upload{.from = bytes.data(), .to = memory->address(), .run_bytes = bytes.size()};
    must(stream_->upload({&upload, 1}));
    must(stream_->finish(soon()));
    return memory;
  }
  std::vector<std::byte> read(DeviceAddress from, std::size_t bytes) {
    return read(*stream_, from, bytes);
  }
  static std::vector<std::byte> read(Stream& stream, DeviceAddress from, std::size_t bytes) {
    std::vector<std::byte> out(bytes);
    const Download download{.from = from, .to = out.data(), .bytes = bytes};
    must(stream.download({&download, 1}));
    must(stream.finish(soon()));
    return out;
  }
  bool done_soon(const Event& event) {
    for (const TimePoint deadline = soon(); SteadyClock().now() < deadline;) {
      if (must(device_->is_done(event))) return true;
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
    return false;
  }

  std::unique_ptr<Device> device_;
  std::unique_ptr<Stream> stream_;
};

TEST_P(DeviceConformance, SaysWhatItIs) {
  EXPECT_FALSE(device_->id().empty());
  EXPECT_FALSE(device_->name().empty());
  const DeviceMemory memory = must(device_->memory());
  EXPECT_GT(memory.free_bytes, 0u);
  EXPECT_LE(memory.free_bytes, memory.total_bytes);
}

TEST_P(DeviceConformance, RunsOfAnySizeAndAlignmentGoInAndComeBack) {
  for (const std::size_t bytes : {1u, 3u, 255u, 4096u, (1u << 20) + 7}) {
    for (const std::size_t shift : {0u, 1u, 13u}) {
      const auto source = pattern(bytes + shift, bytes);
      const auto memory = must(device_->allocate(bytes + shift));
      const Upload upload{
          .from = source.data() + shift, .to = memory->address() + shift, .run_bytes = bytes};
      must(stream_->upload({&upload, 1}));
      const std::vector<std::byte> expected(source.begin() + static_cast<std::ptrdiff_t>(shift),
                                            source.end());
      EXPECT_EQ(read(memory->address() + shift, bytes), expected) << bytes << " + " << shift;
    }
  }
}

TEST_P(DeviceConformance, RowsGoWhereTheirStridesSay) {
  struct Case {
    std::uint64_t run, rows, from_stride, to_stride;
  };
  for (const Case& one : {Case{13, 1000, 29, 17}, Case{256, 64, 512, 256}, Case{64, 64, 64, 128},
                          Case{100, 10, 100, 100}, Case{8, 5, 0, 8}, Case{7, 1, 0, 0}}) {
    const auto source = pattern(one.rows * one.from_stride + one.run, one.run);
    std::vector<std::byte> expected(one.rows * one.to_stride + one.run, std::byte{0xee});
    const auto memory = filled(expected);
    const Upload upload{.from = source.data(),
                        .to = memory->address(),
                        .run_bytes = one.run,
                        .rows = one.rows,
                        .from_stride = one.from_stride,
                        .to_stride = one.to_stride};
    must(stream_->upload({&upload, 1}));
    for (std::uint64_t row = 0; row < one.rows; ++row) {
      std::memcpy(expected.data() + row * one.to_stride, source.data() + row * one.from_stride,
                  one.run);
    }
    EXPECT_EQ(read(memory->address(), expected.size()), expected) << one.run << " * " << one.rows;
  }
}

TEST_P(DeviceConformance, ManyCopiesGoInOneCall) {
  constexpr std::size_t kCopies = 200;
  const auto source = pattern(kCopies * 1000, 1);
  std::vector<std::byte> expected(source.size(), std::byte{0xee});
  const auto memory = filled(expected);
  std::vector<Upload> uploads;
  for (std::size_t i = 0; i < kCopies; ++i) {
    const std::uint64_t bytes = i * 5;  // the first has none
    uploads.push_back(
        {.from = source.data() + i * 1000, .to = memory->address() + i * 1000, .run_bytes = bytes});
    std::memcpy(expected.data() + i * 1000, source.data() + i * 1000, bytes);
  }
  must(stream_->upload(uploads));
  EXPECT_EQ(read(memory->address(), expected.size()), expected);
  must(stream_->upload({}));
  must(stream_->finish(soon()));
}

TEST_P(DeviceConformance, BytesMoveInsideTheDevice) {
  for (const std::size_t moves : {1u, 3u, 200u}) {
    const auto source = pattern(moves * 777, moves);
    const auto from = filled(source);
    const auto to = filled(std::vector<std::byte>(source.size()));
    std::vector<std::byte> expected(source.size());
    std::vector<Move> all;
    for (std::size_t i = 0; i < moves; ++i) {
      const std::uint64_t bytes = i == 1 ? 0 : 1 + i * 3;
      const std::size_t back = (moves - 1 - i) * 777;
      all.push_back(
          {.from = from->address() + i * 777, .to = to->address() + back, .bytes = bytes});
      std::memcpy(expected.data() + back, source.data() + i * 777, bytes);
    }
    must(stream_->move(all));
    EXPECT_EQ(read(to->address(), expected.size()), expected) << moves;
  }
}

TEST_P(DeviceConformance, MovesOfAnySizeAndAlignmentTouchNothingBetween) {
  constexpr std::size_t kRoom = (5 << 20) + 64;
  constexpr std::size_t kEdge = 4 << 20;  // of what a kernel does
  const std::size_t sizes[] = {1,      2,     15,        16,        17,     4095,
                               65'537, kEdge, kEdge - 1, kEdge + 1, 5 << 20};
  const std::pair<std::size_t, std::size_t> offsets[] = {{0, 0}, {16, 32}, {1, 1}, {2, 6}, {3, 4}};
  const auto source = pattern(std::size(sizes) * kRoom, 3);
  const auto from = filled(source);
  for (const bool default_stream : {false, true}) {
    const auto borrowed = must(device_->borrow_stream(nullptr));
    Stream& stream = default_stream ? *borrowed : *stream_;
    for (const auto& [there, here] : offsets) {
      std::vector<std::byte> expected(source.size(), std::byte{0xaa});
      const auto to = filled(expected);
      std::vector<Move> all;
      for (std::size_t i = 0; i < std::size(sizes); ++i) {
        const std::size_t at = i * kRoom;
        all.push_back({from->address() + at + there, to->address() + at + here, sizes[i]});
        std::memcpy(expected.data() + at + here, source.data() + at + there, sizes[i]);
      }
      must(stream.move(all));
      must(stream.finish(soon()));
      EXPECT_EQ(read(to->address(), expected.size()), expected) << there << " to " << here;
    }
  }
}

TEST_P(DeviceConformance, ThousandsOfMovesGoInOneCall) {
  constexpr std::size_t kMoves = 5000;
  const auto source = pattern(kMoves * 48, 4);
  const auto from = filled(source);
  const auto to = filled(std::vector<std::byte>(source.size()));
  std::vector<Move> all;
  for (std::size_t i = 0; i < kMoves; ++i) {
    all.push_back({from->address() + i * 48, to->address() + i * 48, i % 49});
  }
  std::vector<std::byte> expected(source.size());
  for (std::size_t i = 0; i < kMoves; ++i) {
    std::memcpy(expected.data() + i * 48, source.data() + i * 48, i % 49);
  }
  must(stream_->move(all));
  EXPECT_EQ(read(to->address(), expected.size()), expected);
}

// Memory that was pinned piece by piece, and not all of it.
TEST_P(DeviceConformance, CopiesCrossTheBordersOfPins) {
  constexpr std::size_t kPiece = 1 << 20;
  const auto source = pattern(4 * kPiece, 5);
  const UniqueFd fd(::memfd_create("segment", MFD_CLOEXEC));
  ASSERT_EQ(::write(fd.get(), source.data(), source.size()), static_cast<ssize_t>(source.size()));
  void* const map = ::mmap(nullptr, source.size(), PROT_READ, MAP_SHARED, fd.get(), 0);
  ASSERT_NE(map, MAP_FAILED);
  const auto* const bytes = static_cast<const std::byte*>(map);
  {
    std::vector<std::unique_ptr<Pin>> pins;
    for (const std::size_t piece : {0u, 1u, 3u}) {
      pins.push_back(must(device_->pin({bytes + piece * kPiece, kPiece})));
    }
    const auto memory = must(device_->allocate(source.size()));
    const Upload whole{.from = bytes, .to = memory->address(), .run_bytes = source.size()};
    must(stream_->upload({&whole, 1}));
    EXPECT_EQ(read(memory->address(), source.size()), source);

    const auto rows = must(device_->allocate(source.size()));
    const Upload strided{.from = bytes + 11,
                         .to = rows->address(),
                         .run_bytes = 5000,
                         .rows = 400,
                         .from_stride = 10'001,
                         .to_stride = 5000};
    must(stream_->upload({&strided, 1}));
    std::vector<std::byte> expected(400 * 5000);
    for (std::size_t row = 0; row < 400; ++row) {
      std::memcpy(expected.data() + row * 5000, source.data() + 11 + row * 10'001, 5000);
    }
    EXPECT_EQ(read(rows->address(), expected.size()), expected);
  }
  ::munmap(map, source.size());
}

TEST_P(DeviceConformance, DownloadsOfRowsLieApartAndTouchNothingBetween) {
  constexpr std::size_t kRows = 300;
  constexpr std::size_t kRun = 700;
  const auto source = pattern(kRows * 1000, 9);
  const auto memory = must(device_->allocate(source.size()));
  const Upload upload{.from = source.data(), .to = memory->address(), .run_bytes = source.size()};
  must(stream_->upload({&upload, 1}));
  std::vector<std::byte> seen(kRows * 1500, std::byte{'?'});
  {
    // Pinned in part, by pages.
    const std::size_t past = reinterpret_cast<std::uintptr_t>(seen.data()) % 4096;
    const auto pin = must(device_->pin({seen.data() + 8192 - past, 65'536}));
    const Download download{.from = memory->address() + 3,
                            .to = seen.data() + 5,
                            .bytes = kRun,
                            .rows = kRows,
                            .from_stride = 900,
                            .to_stride = 1400};
    must(stream_->download({&download, 1}));
    must(stream_->finish(soon()));
  }
  std::vector<std::byte> expected(seen.size(), std::byte{'?'});
  for (std::size_t row = 0; row < kRows; ++row) {
    std::memcpy(expected.data() + 5 + row * 1400, source.data() + 3 + row * 900, kRun);
  }
  EXPECT_EQ(seen, expected);
}

TEST_P(DeviceConformance, B7DigestsAreThoseOfTheBytesInTheDevicesMemory) {
  std::mt19937_64 random(11);
  const auto source = cuda::testing::noise(4 << 20, random);
  const auto memory = filled(source);
  constexpr std::size_t kMost = 700;
  const auto digests = must(device_->make_digests(kMost));
  EXPECT_EQ(digests->capacity(), kMost);
  // Short ones before a long one, and so many long ones that they take several launches.
  for (const std::size_t count : {std::size_t{1}, std::size_t{60}, kMost, std::size_t{0}}) {
    std::vector<BoxBytes> boxes;
    std::vector<Digest> expected;
    for (std::size_t i = 0; i < count; ++i) {
      BoxBytes box = cuda::testing::random_box(random, source.size());
      if (i % 8 != 7) box = {.address = random() % 4096 * 16, .run_bytes = 1000};
      if (count == kMost && i % 2 == 1) box.run_bytes = std::min(box.run_bytes, 100u);
      if (cuda::testing::bytes_of_box(box) == 0) box.run_bytes = 1;
      if (i > 400) box = {.address = i % 3 * 16, .run_bytes = 1u << 20};
      if (i > 402) box.run_bytes = 1;
      expected.push_back(blake3(cuda::testing::bytes_in(box, source)));
      boxes.push_back(cuda::testing::box_at(box, memory->address()));
    }
    must(stream_->digest(boxes, *digests));
    must(stream_->finish(soon()));
    const auto values = digests->values();
    ASSERT_TRUE(std::equal(values.begin(), values.end(), expected.begin(), expected.end()));
  }
  const std::vector<BoxBytes> too_many(kMost + 1, {.address = memory->address(), .run_bytes = 1});
  EXPECT_EQ(stream_->digest(too_many, *digests).error().code(), ErrorCode::kInvalid);
}

TEST_P(DeviceConformance, AnEventThatWasNeverRecordedIsDoneAndHoldsNothingUp) {
  const auto event = must(device_->make_event());
  EXPECT_TRUE(must(device_->is_done(*event)));
  must(stream_->wait(*event));
  must(stream_->finish(soon()));
}

TEST_P(DeviceConformance, AStreamWaitsForAnothersEventEachTimeItIsRecorded) {
  constexpr std::size_t kBytes = 8 << 20;
  const auto other = must(device_->make_stream());
  const auto event = must(device_->make_event());
  const auto first = must(device_->allocate(kBytes));
  const auto second = must(device_->allocate(kBytes));
  std::vector<std::byte> source;
  for (std::uint64_t round = 0; round < 8; ++round) {
    source = pattern(kBytes, round);
    const Upload upload{.from = source.data(), .to = first->address(), .run_bytes = kBytes};
    must(stream_->upload({&upload, 1}));
    must(stream_->record(*event));
    must(other->wait(*event));
    const Move move{.from = first->address(), .to = second->address(), .bytes = kBytes};
    must(other->move({&move, 1}));
    ASSERT_EQ(read(*other, second->address(), kBytes), source) << round;
    EXPECT_TRUE(must(device_->is_done(*event)));
  }
}

TEST_P(DeviceConformance, AnEventIsDoneOnceTheWorkBeforeItIs) {
  const auto source = pattern(4 << 20, 1);
  const auto memory = must(device_->allocate(source.size()));
  const auto event = must(device_->make_event());
  const Upload upload{.from = source.data(), .to = memory->address(), .run_bytes = source.size()};
  must(stream_->upload({&upload, 1}));
  must(stream_->record(*event));
  ASSERT_TRUE(done_soon(*event));
  const auto other = must(device_->make_stream());
  EXPECT_EQ(read(*other, memory->address(), source.size()), source);
}

TEST_P(DeviceConformance, AnEventMayGoWhileItIsAwaited) {
  const auto source = pattern(4 << 20, 1);
  const auto memory = must(device_->allocate(source.size()));
  const auto other = must(device_->make_stream());
  const Upload upload{.from = source.data(), .to = memory->address(), .run_bytes = source.size()};
  must(stream_->upload({&upload, 1}));
  {
    const auto event = must(device_->make_event());
    must(stream_->record(*event));
    must(other->wait(*event));
  }
  EXPECT_EQ(read(*other, memory->address(), source.size()), source);
}

TEST_P(DeviceConformance, AStreamThatGoesHasDoneItsWork) {
  const auto source = pattern(16 << 20, 1);
  const auto memory = must(device_->allocate(source.size()));
  {
    const auto brief = must(device_->make_stream());
    const Upload upload{.from = source.data(), .to = memory->address(), .run_bytes = source.size()};
    must(brief->upload({&upload, 1}));
  }
  EXPECT_EQ(read(memory->address(), source.size()), source);
}

TEST_P(DeviceConformance, TheDefaultStreamIsBorrowed) {
  const auto source = pattern(8 * 4096, 1);
  const auto memory = must(device_->allocate(source.size()));
  const auto stream = must(device_->borrow_stream(nullptr));
  std::vector<Upload> uploads;
  for (std::size_t at = 0; at < source.size(); at += 4096) {
    uploads.push_back(
        {.from = source.data() + at, .to = memory->address() + at, .run_bytes = 4096});
  }
  must(stream->upload(uploads));
  EXPECT_EQ(read(*must(device_->borrow_stream(nullptr)), memory->address(), source.size()), source);
}

TEST_P(DeviceConformance, AnyThreadMayUseIt) {
  const auto source = pattern(1 << 20, 1);
  std::thread([&] {
    const auto memory = filled(source);
    EXPECT_EQ(read(memory->address(), source.size()), source);
  }).join();
}

TEST_P(DeviceConformance, MemoryIsAlignedAndRunsOut) {
  EXPECT_EQ(device_->allocate(0).error().code(), ErrorCode::kInvalid);
  const std::uint64_t chunk = must(device_->memory()).total_bytes / 4;
  std::vector<std::unique_ptr<Memory>> all;
  auto next = device_->allocate(chunk);
  while (next && all.size() < 8) {
    EXPECT_EQ((*next)->address() % 256, 0u);
    EXPECT_EQ((*next)->bytes(), chunk);
    all.push_back(std::move(*next));
    next = device_->allocate(chunk);
  }
  ASSERT_FALSE(next) << "more than there is";
  EXPECT_EQ(next.error().code(), ErrorCode::kExhausted) << next.error().message();
  ASSERT_FALSE(all.empty());
  all.pop_back();
  EXPECT_TRUE(device_->allocate(chunk));
}

TEST_P(DeviceConformance, TwoProcessesShareMemoryAndEvents) {
  constexpr std::size_t kBytes = 4 << 20;
  const auto memory = must(device_->allocate(kBytes));
  const auto filling = must(device_->make_event());
  DeviceChild child("exchange");
  send_word(child.socket(), kBytes);
  send_handle(child.socket(), must(device_->share(*memory)));
  send_handle(child.socket(), must(device_->share(*filling)));
  const auto released = must(device_->open_event(receive_handle(child.socket())));
  EXPECT_TRUE(must(device_->is_done(*released)));
  std::vector<std::byte> source;
  for (std::uint64_t round = 1; round <= 4; ++round) {
    source = pattern(kBytes, round);
    const Upload upload{.from = source.data(), .to = memory->address(), .run_bytes = kBytes};
    must(stream_->upload({&upload, 1}));
    must(stream_->record(*filling));
    send_word(child.socket(), round);
    ASSERT_EQ(receive_word(child.socket()), round);
    ASSERT_TRUE(done_soon(*released));
    ASSERT_EQ(read(memory->address(), kBytes), pattern(kBytes, round + kAnswer)) << round;
  }
  send_word(child.socket(), 0);
}

TEST_P(DeviceConformance, ABlockOutlivesTheProcessThatMadeIt) {
  Handle left;
  std::uint64_t bytes = 0;
  {
    DeviceChild child("leave");
    bytes = receive_word(child.socket());
    left = receive_handle(child.socket());
    child.kill();
  }
  EXPECT_GE(bytes, kLeftBytes);
  const auto expected = pattern(kLeftBytes, kLeft);
  const auto changed = pattern(kLeftBytes, kLeft + 1);
  UniqueFd again;
  {
    const auto reader = must(device_->open_block(left.fd, bytes, Access::kRead));
    EXPECT_EQ(reader->bytes(), bytes);
    EXPECT_EQ(read(reader->address(), kLeftBytes), expected);
    const auto writer = must(device_->open_block(left.fd, bytes, Access::kWrite));
    const Upload upload{
        .from = changed.data(), .to = writer->address(), .run_bytes = changed.size()};
    must(stream_->upload({&upload, 1}));
    must(stream_->finish(soon()));
    EXPECT_EQ(read(reader->address(), kLeftBytes), changed);
    again = must(writer->export_descriptor());
  }
  left.fd.reset();
  EXPECT_EQ(read(must(device_->open_block(again, bytes, Access::kRead))->address(), kLeftBytes),
            changed);
}

TEST_P(DeviceConformance, TheAccessToABlockChangesAndItsAddressDoesNot) {
  const auto bytes = pattern(kLeftBytes, kLeft);
  const auto changed = pattern(kLeftBytes, kLeft + 1);
  const auto block = must(device_->allocate_block(kLeftBytes));
  const DeviceAddress address = block->address();
  const auto write = [&](const Block& to, const auto& from) {
    const Upload upload{.from = from.data(), .to = to.address(), .run_bytes = from.size()};
    must(stream_->upload({&upload, 1}));
    must(stream_->finish(soon()));
  };
  EXPECT_EQ(block->access(), Access::kWrite);
  write(*block, bytes);
  must(block->set_access(Access::kRead));
  EXPECT_EQ(block->access(), Access::kRead);
  EXPECT_EQ(block->address(), address);
  EXPECT_EQ(read(address, kLeftBytes), bytes);
  // The other processes that have it open may still write.
  const UniqueFd descriptor = must(block->export_descriptor());
  write(*must(device_->open_block(descriptor, block->bytes(), Access::kWrite)), changed);
  EXPECT_EQ(read(address, kLeftBytes), changed);
  must(block->set_access(Access::kWrite));
  write(*block, bytes);
  EXPECT_EQ(read(address, kLeftBytes), bytes);
}

TEST_P(DeviceConformance, TheBytesOfBlocksAreDigestedWhereTheyLie) {
  std::vector<BlockFile> blocks;
  std::vector<Digest> expected;
  for (const std::uint64_t seed : {1u, 2u, 3u}) {
    const auto bytes = pattern(seed * (2 << 20), seed);
    const auto block = must(device_->allocate_block(bytes.size()));
    const Upload upload{.from = bytes.data(), .to = block->address(), .run_bytes = bytes.size()};
    must(stream_->upload({&upload, 1}));
    must(stream_->finish(soon()));
    for (std::size_t at = 0; at < bytes.size(); at += kPieceBytes) {
      expected.push_back(blake3(std::span(bytes).subspan(at, kPieceBytes)));
    }
    blocks.push_back({must(block->export_descriptor()), block->bytes()});
  }
  EXPECT_EQ(must(digest_blocks(*device_, blocks, soon())), expected);
}

TEST_P(DeviceConformance, TheMemoryOfABlockGoesWithItsLastDescriptor) {
  const std::uint64_t most = must(device_->memory()).free_bytes / 3 * 2;
  auto block = must(device_->allocate_block(most));
  UniqueFd descriptor = must(block->export_descriptor());
  block.reset();
  descriptor.reset();
  block = must(device_->allocate_block(most));
  EXPECT_EQ(device_->allocate_block(most).error().code(), ErrorCode::kExhausted);
}

TEST_P(DeviceConformance, WhatIsNoBlockIsNotOpened) {
  const auto block = must(device_->allocate_block(8 << 20));
  const UniqueFd descriptor = must(block->export_descriptor());
  const std::uint64_t bytes = block->bytes();
  for (const std::uint64_t wrong : {std::uint64_t{0}, bytes - 1, bytes / 2, bytes * 2}) {
    const auto opened = device_->open_block(descriptor, wrong, Access::kRead);
    ASSERT_FALSE(opened) << wrong;
    EXPECT_EQ(opened.error().code(), ErrorCode::kInvalid) << opened.error().message();
  }
  const UniqueFd file(::memfd_create("no block", MFD_CLOEXEC));
  const UniqueFd null(::open("/dev/null", O_RDWR | O_CLOEXEC));
  for (const UniqueFd* const stranger : {&file, &null, &descriptor}) {
    const std::uint64_t size = stranger == &descriptor ? bytes * 2 : bytes;
    const auto opened = device_->open_block(*stranger, size, Access::kRead);
    ASSERT_FALSE(opened);
    EXPECT_EQ(opened.error().code(), ErrorCode::kInvalid) << opened.error().message();
  }
  EXPECT_EQ(device_->open_block(UniqueFd(), bytes, Access::kRead).error().code(),
            ErrorCode::kInvalid);
  // The device still works.
  EXPECT_TRUE(device_->open_block(descriptor, bytes, Access::kRead));
  EXPECT_EQ(device_->allocate_block(0).error().code(), ErrorCode::kInvalid);
}

TEST_P(DeviceConformance, WhatIsNoHandleIsNotOpened) {
  const Handle wrong{"not a handle", UniqueFd()};
  EXPECT_EQ(device_->open_memory(wrong, 4096).error().code(), ErrorCode::kInvalid);
  EXPECT_EQ(device_->open_event(wrong).error().code(), ErrorCode::kInvalid);
}

}  // namespace rekindle::bucket::testing
