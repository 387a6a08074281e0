#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include <boost/asio/any_io_executor.hpp>

#include "recovery/agent/agent_core.h"
#include "recovery/device/device_link.h"
#include "recovery/worker/agent_host.h"

namespace rekindle::agent {

// Gives the workers' service its access to this agent and to the coordinator. Control thread only.
class WorkerHost final : public worker::Host, private Holder {
 public:
  // The device process, if any, holds the copies that the core serves for as long as this lives.
  explicit WorkerHost(AgentCore& core, device::DeviceLink* devices = nullptr);
  ~WorkerHost() override;

  store::SegmentStore& store() override { return core_.store(); }
  WorkerPool& blocking_pool() override { return core_.blocking_pool(); }
  async::Task<Result<ModelVersion>> newest(std::string model) override;
  Result<void> may_attach(const ModelVersion& id) const override;
  async::Task<Result<std::shared_ptr<const store::StoredVersion>>> pull(
      pull::PullRequest request, pull::OnProgress progress, pull::PullWatch watch) override;
  async::Task<Result<Digest>> publish(ModelVersion id, store::FilledSegments filled) override;
  void publication_ended(const worker::Publisher& by, const ModelVersion& id,
                         const Result<void>& outcome) override;
  std::optional<Digest> root_here(const ModelVersion& id) const override;
  joint::JointPublications* joint() override { return &core_.joint(); }
  worker::CopyVerifier& verifier() override { return core_.health().verifier(); }
  bool has_fleet() const override { return core_.link().configured(); }
  async::Task<Result<worker::InstanceVerdict>> report(worker::RankReport from) override;
  Result<UniqueFd> serve_device(device::DeviceOrder order) override;
  void tell_device(std::uint64_t session, const TileRuns& verified, bool complete) override;
  void end_device(std::uint64_t session, bool gone) override;
  void spread_device(const device::SpreadOrder& order) override;
  void stop_spread(std::uint64_t session, const std::string& why) override;
  void make_meeting_id(std::uint64_t number) override;
  std::string device_life() const override;
  void copy_block(const std::string& device, bucket::BlockFile block, std::string data,
                  std::function<void(Result<std::string>)> on_copied) override;
  void check_blocks(const std::string& device, std::vector<bucket::BlockFile> blocks,
                    std::function<void(Result<std::vector<Digest>>)> on_checked) override;
  Result<std::vector<std::string>> homes_near(const std::string& device) override;
  Result<transport::DeviceLanding> land_in_device(int fd, std::uint64_t bytes,
                                                  std::vector<std::string> homes) override;
  void bucket_landed(std::uint64_t session, std::size_t bucket) override;
  void reads_over(std::uint64_t session, const std::string& why) override;
  async::Task<Result<proto::RoundOrders>> report_rounds(proto::RoundReport report) override;
  async::Task<Result<std::uint64_t>> begin_update(ModelVersion id, std::string group,
                                                  std::chrono::milliseconds gather,
                                                  std::uint32_t members) override;
  async::Task<Result<proto::RoundStatus>> update_status(std::uint64_t round,
                                                        std::chrono::milliseconds wait) override;
  // The device process pins this file of the store's reserve as long as the store keeps the file.
  // Any thread. `executor`: the control thread.
  void hold_reserve(const store::MappedSegment& segment, boost::asio::any_io_executor executor);

 private:
  // While it lives, posted calls find this object.
  struct Lifetime {};

  void hold(const Served& served) override;
  void drop(std::uint64_t number) override { devices_->drop(number); }

  AgentCore& core_;
  device::DeviceLink* const devices_;
  std::atomic<std::uint64_t> reserve_files_ = 0;
  const std::shared_ptr<Lifetime> lifetime_ = std::make_shared<Lifetime>();
};

}  // namespace rekindle::agent
