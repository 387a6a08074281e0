#pragma once

#include <cstring>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <gtest/gtest.h>

#include "src/base/unique_fd.h"
#include "src/base/units.h"
#include "tests/verbs/fake_verbs.h"
#include "transport/verbs/memory/memory_registrar.h"

namespace rekindle::transport::verbs {

inline TimePoint soon() { return SteadyClock().now() + std::chrono::seconds(20); }

// A memory file and a mapping of it.
struct MappedFile {
  MappedFile(std::uint64_t size, int protection, std::uint64_t file_offset = 0)
      : fd(::memfd_create("rekindle-test", MFD_CLOEXEC)), offset(file_offset) {
    EXPECT_EQ(::ftruncate(fd.get(), static_cast<off_t>(size + offset)), 0);
    void* const mapped =
        ::mmap(nullptr, size, protection, MAP_SHARED, fd.get(), static_cast<off_t>(offset));
    EXPECT_NE(mapped, MAP_FAILED);
    bytes = {static_cast<std::byte*>(mapped), static_cast<std::size_t>(size)};
  }
  ~MappedFile() { ::munmap(bytes.data(), bytes.size()); }
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  void truncate(std::uint64_t size) const {
    EXPECT_EQ(::ftruncate(fd.get(), static_cast<off_t>(size)), 0);
  }

  UniqueFd fd;
  std::uint64_t offset;
  std::span<std::byte> bytes;
};

// Fake devices mlx5_0, mlx5_1, …, and their registrar.
class RegistrarFixture : public ::testing::Test {
 protected:
  explicit RegistrarFixture(std::size_t count = 2) {
    for (std::size_t i = 0; i < count; ++i) {
      names.push_back(api.add_device({.name = fmt::format("mlx5_{}", i)}));
    }
  }

  // Call this after the test has changed the devices.
  void open(const RegistrarOptions& options = {.max_piece_bytes = 2 * kMiB}) {
    auto opened = Fabric::open(api, {.sysfs = "/nonexistent"});
    ASSERT_TRUE(opened) << opened.error().message();
    fabric = std::move(*opened);
    registrar = MemoryRegistrar::create(*fabric, options);
  }
  void change(const std::function<void(FakeDevice&)>& body) {
    for (const std::string& name : names) network.change(name, body);
  }
  const Device& device(std::size_t index = 0) const { return *fabric->devices().at(index); }

  std::shared_ptr<RegisteredMemory> add(const MappedFile& file, MemoryUse use,
                                        std::shared_ptr<const void> keep_alive = nullptr) {
    return registrar->add(file.bytes, use, file.fd.get(), file.offset, std::move(keep_alive));
  }
  std::shared_ptr<RegisteredMemory> add_settled(const MappedFile& file, MemoryUse use) {
    auto memory = add(file, use);
    EXPECT_TRUE(memory->wait_settled(soon()));
    return memory;
  }
  std::vector<std::string> problems(const RegisteredMemory& memory) {
    std::vector<std::string> lines;
    for (const Error& error : memory.problems()) lines.push_back(error.message());
    return lines;
  }
  static std::uint64_t total(const std::vector<Piece>& pieces) {
    std::uint64_t bytes = 0;
    for (const Piece& piece : pieces) bytes += piece.bytes;
    return bytes;
  }

  FakeNetwork network;
  FakeVerbs api{network};
  std::vector<std::string> names;
  std::unique_ptr<Fabric> fabric;
  std::unique_ptr<MemoryRegistrar> registrar;
};

}  // namespace rekindle::transport::verbs
