#pragma once

#include <memory>
#include <string>
#include <vector>

#include "tests/gpu/gpu_workers.h"

namespace rekindle::testing {

// Workers of a group "g" on several devices, and updates that move them on.
class RoundWorkers : public GpuWorkers {
 protected:
  explicit RoundWorkers(int devices = 2) : devices_(devices) {}
  void SetUp() override;

  // Each with all devices of this host.
  void start_agents(const std::vector<std::string>& names);
  struct Member {
    std::unique_ptr<DeviceClient> client;
    std::string agent;
    std::string attach;  // all but the version and the generation
    int generation = 0;
  };
  // On m@1, ready. `more`: words of its attach ("shard=tp=0/2").
  Member& add_member(const std::string& agent, int device, const std::string& more = {});
  // It waits for an update from now on.
  static void wait(Member& member) { member.client->tell("wait"); }
  static void expect_hears_of(Member& member, int version);
  void attach(Member& member, int version);
  // Hears, attaches, takes all, says loaded; in the steps that all members can do at once.
  static void tell_attach(Member& member, int version);

  // `rekindle update`, in the background.
  std::unique_ptr<Process> start_update(const std::string& version,
                                        std::vector<std::string> more = {});
  Fleet::Answer finish(Process& update);
  // All of them, to a version, without faults: the update's answer.
  Fleet::Answer move_all(int version, std::vector<std::string> more = {});
  // The same as far as each member's second bucket.
  std::unique_ptr<Process> update_to_the_middle(int version);
  // Takes all, compares, is ready.
  void expect_takes(Member& member, const Sums& sums);
  // How many members the update says are ready, and how many of them by broadcast.
  static int ready_in(const nlohmann::json& update);
  static int broadcast_in(const nlohmann::json& update);

  const int devices_;
  std::vector<std::unique_ptr<Member>> members_;
};

// Updates in which something fails.
class FaultyRounds : public RoundWorkers {
 protected:
  explicit FaultyRounds(int devices = 2) : RoundWorkers(devices) {}
  // A member of the group on each device, of these agents: each is at its second bucket of the
  // update, so what fails, fails amid it. The first agent has the copy, or else the holders, which
  // run already.
  void into_the_middle(const std::vector<std::string>& agents,
                       const std::vector<std::string>& holders = {});
  void expect_finish(const std::vector<std::size_t>& members);

  const Checkpoint old_ = plain_checkpoint(32, 31);
  const Checkpoint new_ = plain_checkpoint(32, 32);
  std::unique_ptr<Process> update_;
};

}  // namespace rekindle::testing
