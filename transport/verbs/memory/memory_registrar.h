#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "src/base/clock.h"
#include "src/base/result.h"
#include "src/base/worker_pool.h"
#include "transport/verbs/device/fabric.h"
#include "transport/verbs/device/verbs_api.h"

// Registers memory with the devices of a fabric, in pieces, in the background and with all devices
// in parallel. Thread-safe.
namespace rekindle::transport::verbs {

enum class MemoryUse : std::uint8_t {
  kServe,  // peers read it through windows; devices without windows do not register it
  kLand,   // reads land in it: LOCAL_WRITE
};

// [offset, offset + bytes) of a region on one device.
struct Piece {
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
  std::uint64_t address = 0;  // of byte `offset`, as the device knows it
  std::uint32_t lkey = 0;     // for scatter lists
  ibv_mr* mr = nullptr;       // for binding windows
};

// One region's registrations. The destructor deregisters it: all readers must have drained before.
class RegisteredMemory {
 public:
  virtual ~RegisteredMemory() = default;
  virtual std::span<const std::byte> bytes() const = 0;

  // The usable piece of this device that holds byte `offset`. nullptr: it is not registered, or not
  // yet. Takes no lock and allocates nothing: for pollers. Valid as long as this object.
  virtual const Piece* find(const Device& device, std::uint64_t offset) const = 0;
  // The pieces that are usable on this device now, by offset. There may be holes.
  virtual std::vector<Piece> pieces(const Device& device) const = 0;
  // Grows with every piece that becomes usable: a cheap test for news.
  virtual std::uint64_t change_count() const = 0;

  // All pieces are registered or have failed.
  virtual bool settled() const = 0;
  virtual bool wait_settled(TimePoint deadline) const = 0;  // false: not by then
  // Why some of it is not registered, when settled: bytes needed, the limit, what to do.
  virtual std::vector<Error> problems() const = 0;
};

struct RegistrarOptions {
  std::size_t threads = 0;  // 0: as many as devices, at most 16
  std::uint64_t max_piece_bytes = std::uint64_t{1} << 30;
  // The limit per device, all regions together. 0: as much as the devices and the memlock limit let
  // through. For tests, and for hosts that need their memory elsewhere.
  std::uint64_t max_bytes_per_device = 0;
  // MemoryRegistrar::keeps_idle_memory(). nullopt: it is found out.
  std::optional<bool> keeps_idle_memory;
};

struct RegistrarStats {
  // Registered now, or about to be, summed over devices.
  std::uint64_t bytes = 0;
  std::uint64_t pieces = 0;
  std::uint64_t failures = 0;
  // The wall time that faulting pages in has taken, summed over regions.
  Duration touching{};
};

class MemoryRegistrar {
 public:
  virtual ~MemoryRegistrar() = default;  // every RegisteredMemory is gone by then
  // `fabric` outlives it.
  static std::unique_ptr<MemoryRegistrar> create(Fabric& fabric, const RegistrarOptions& options);

  // Begins at once, in the background. Pieces become usable one by one, in order of their offsets.
  // `fd` and `fd_offset` name the file behind `bytes`; -1: none. For devices that refuse to
  // register a read-only mapping, the file is mapped once more. `keep_alive` is held as long as
  // anything is registered.
  virtual std::shared_ptr<RegisteredMemory> add(std::span<const std::byte> bytes, MemoryUse use,
                                                int fd, std::uint64_t fd_offset,
                                                std::shared_ptr<const void> keep_alive) = 0;
  // Whether a device refuses to register a read-only mapping of a file, as all do before Linux 6.2.
  // The files of served regions are mapped for writing then. Finds out by trying, and blocks
  // meanwhile.
  virtual bool maps_files_for_writing() const = 0;
  // Whether registrations may stay while nobody uses them: the process may pin any amount, so that
  // others need not make room, and forks are harmless without a mark on the memory.
  virtual bool keeps_idle_memory() const = 0;
  virtual RegistrarStats stats() const = 0;
};

}  // namespace rekindle::transport::verbs
