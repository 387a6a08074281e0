#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include <boost/asio/any_io_executor.hpp>

#include "recovery/worker/agent_host.h"
#include "recovery/worker/resident_copy.h"
#include "src/async/task.h"

namespace rekindle::worker {

// Reads, compares and mends bytes of resident copies by the device process. It decides nothing.
// kUnavailable, kPeerLost, kTimeout, kInternal: the device process starts, ends or fails, and may
// answer later. Control thread only.
class ResidentBytes {
 public:
  // Both outlive this.
  ResidentBytes(CopyHost& copies, DeviceHost& devices, boost::asio::any_io_executor executor)
      : copies_(copies), devices_(devices), executor_(std::move(executor)) {}

  async::Task<Result<std::vector<Digest>>> digests(std::string device,
                                                   std::vector<bucket::BlockFile> blocks);
  // The tiles that differ from their seal: of all, or of `count` tiles of one block.
  async::Task<Result<std::vector<std::size_t>>> compare(OpenResidentPtr resident);
  async::Task<Result<std::vector<std::size_t>>> compare(OpenResidentPtr resident, std::size_t first,
                                                        std::size_t count);
  // Makes a tile right from this host's copy. Writes nothing but bytes with the digest of the seal,
  // and only if `may_write` says so just before. kCorrupt: this host cannot make it right.
  async::Task<Result<void>> mend(OpenResidentPtr resident, std::size_t tile,
                                 std::function<bool()> may_write);

 private:
  async::Task<Result<std::string>> copy(std::string device, bucket::BlockFile block,
                                        std::string data);
  async::Task<Result<std::string>> right_bytes(OpenResidentPtr resident, std::size_t tile,
                                               std::string bytes);

  CopyHost& copies_;
  DeviceHost& devices_;
  const boost::asio::any_io_executor executor_;
};

// Whether the device process may be able to do it later.
bool may_work_later(const Error& why);

}  // namespace rekindle::worker
