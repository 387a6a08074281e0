#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <boost/asio/any_io_executor.hpp>

#include "proto/agent.pb.h"
#include "proto/resident.pb.h"
#include "proto/worker.pb.h"
#include "recovery/keeper/keeper_link.h"
#include "recovery/worker/agent_host.h"
#include "recovery/worker/event_log.h"
#include "recovery/worker/resident_bytes.h"
#include "recovery/worker/resident_copy.h"
#include "recovery/worker/session_serving.h"
#include "src/async/task.h"
#include "src/async/task_group.h"
#include "src/ipc/forked_processes.h"

namespace rekindle::worker {

// A worker gets a copy only if all of this is the same.
struct ResidentIdentity {
  ModelVersion id;
  Digest root;
  // The worker's text for everything that decides what the bytes mean.
  std::string key;
  std::string device;
  std::uint32_t uid = 0;
  // Several workers read it at the same time. Otherwise it belongs to one.
  bool shared = false;
  bool operator==(const ResidentIdentity&) const = default;
};

// What Residents wants of the sessions of workers.
class ResidentOwners {
 public:
  virtual ~ResidentOwners() = default;
  // Has the worker of the session call MendResident between two steps, and waits until it has. An
  // error: the worker has not, for example because it watches for no orders.
  virtual async::Task<Result<void>> order_mend(SessionId session, std::vector<std::string> tensors,
                                               TimePoint give_up) = 0;
  // The worker of the session computes with wrong bytes.
  virtual void resident_is_wrong(SessionId session, const Error& why) = 0;
};

// What the scrub has done since the start.
struct ResidentTotals {
  std::uint64_t scrubbed_bytes = 0;
  std::uint64_t passes = 0;
  std::uint64_t wrong_tiles = 0;
  std::uint64_t mended_tiles = 0;
};

// The resident copies of this host: parameters of workers in blocks of GPU memory that outlive
// them. The keeper holds the blocks; this knows whom they are for, has them checked, and decides
// when they are given back. docs/internals/resident.md. Control thread only.
class Residents final : private keeper::KeeperEvents {
 public:
  struct Options {
    keeper::KeeperLinkOptions keeper;
    // Of a copy without a worker. 0: this agent keeps none.
    std::chrono::milliseconds time_to_live{};
    // Whether a worker with this pid is connected to the agent.
    std::function<bool(pid_t)> is_worker;
  };
  // All references outlive this.
  Residents(CopyHost& copies, DeviceHost& devices, EventLog& events, async::TaskGroup& tasks,
            boost::asio::any_io_executor executor, Options options);

  // Null: no session ever hears of wrong bytes.
  void tell_owners(ResidentOwners* owners) { owners_ = owners; }
  // Asks a keeper that runs already for its copies: those of an earlier agent, or those that a lost
  // connection has left there.
  void recover();
  async::Task<void> close(std::chrono::milliseconds deadline);
  bool enabled() const { return options_.time_to_live.count() > 0; }

  // Keeps the parameters of a committed session. kInvalid: the request. kUnavailable: this agent
  // keeps none, or has no pidfd of the worker. kExhausted: a seal of this worker, or too many
  // others, are under way. kStale: the worker attached again, or ended, meanwhile. Other errors are
  // those of the check and of the keeper; nothing is kept then.
  async::Task<Result<void>> seal(SessionPtr session, proto::SealResident request,
                                 std::vector<UniqueFd> blocks);

  struct Taken {
    std::string name;
    proto::ResidentRecord record;
    std::vector<UniqueFd> blocks;
  };
  // The copy of `id` for the worker of this session, after a check of every byte. The worker is a
  // user of it from then on. An error says why there is none; a copy that fails its check is
  // dropped.
  async::Task<Result<Taken>> take(SessionPtr session, ModelVersion id);
  // The worker of this session has to load, and needs memory of its device: drops the copies there
  // that nobody uses.
  void make_room(const Session& session);

  // This worker is about to write to its parameters of the model on the device. "": it may be any.
  // It leaves a shared copy, and gets other memory; its own copy is dropped.
  void before_write(const Client& client, const std::string& model, const std::string& device);
  // Call it when a session has ended. `detached`: its worker lives, and gives its copy up.
  void session_ended(const Session& session, bool detached);
  // Drops the copies of a version, of one device ("": all) or of all versions (empty model).
  // Returns their number. Workers that use them keep their memory.
  std::size_t release(const std::string& model, std::optional<std::uint64_t> version,
                      const std::string& device, const std::string& why);
  // A drained host gives the memory back, and keeps nothing until that is undone.
  void drain(bool drained);
  void add_status(proto::AgentStatusResponse& status) const;

  // --- scrub and mend

  // Tiles of one block of a copy.
  struct Piece {
    std::string name;
    std::size_t first = 0;
    std::size_t count = 0;
  };
  // All tiles of all copies.
  async::Task<std::vector<Piece>> scrub_pieces();
  // Reads a piece. Wrong tiles are mended, or the copy is dropped and its worker fails. False: the
  // device process cannot read it now.
  async::Task<bool> scrub(Piece piece);
  // A pass has read these pieces.
  void scrubbed(const std::vector<Piece>& pieces);
  // The worker of the session has paused: makes the wrong tiles of its copy right. kCorrupt: that
  // is not possible; the copy is dropped.
  async::Task<Result<void>> mend(SessionPtr session);
  const ResidentTotals& totals() const { return totals_; }

 private:
  // A process that has the blocks of a copy open.
  struct User {
    // Client::process
    std::string process;
    UniqueFd pidfd;
    // Tells children that it leaves behind. nullopt: this agent cannot.
    std::optional<ipc::Lineage> lineage;
    // This agent has seen its death; the keeper will.
    bool dying = false;
  };
  // A check of every byte, at the death of a worker or for the next one.
  struct Check {
    explicit Check(const boost::asio::any_io_executor& executor) : done(executor) {}
    async::Notifier done;
    const TimePoint begun = steady_now();
    std::optional<Result<void>> verdict;
  };
  struct Copy {
    ResidentIdentity identity;
    std::uint64_t bytes = 0;
    std::string instance;
    // By the keeper's numbers.
    std::map<keeper::UserId, User> users;
    // The users of the sessions whose workers use it. 0: the worker takes it over.
    std::map<SessionId, keeper::UserId> sessions;
    // For a new keeper, for checks and for the scrub. Null without users, unless a check runs: the
    // memory then belongs to the keeper alone, which frees it even if this agent hangs.
    OpenResidentPtr opened;
    // Of the last user that has gone. Its children may have the blocks open.
    std::optional<ipc::Lineage> gone;
    std::vector<ipc::FileId> files;
    // False: it is lost, unless this agent brings it to a new keeper.
    bool at_keeper = true;
    // The last one since a worker could write. Null: there was none.
    std::shared_ptr<Check> check;
    // Reads of the scrub in a row that failed on the GPU.
    int failures = 0;
    // Wrong tiles that wait for the worker.
    std::set<std::size_t> damaged;
    // The end of the scrub's last pass over it. 0: there was none.
    std::uint64_t read_unix_us = 0;

    bool is_free() const { return users.empty() && sessions.empty(); }
    bool is_used() const;
    bool may_be_taken() const { return identity.shared || is_free(); }
    // Forgets a user that has died or left, and what only users need.
    void remove(keeper::UserId user);
    // Closes the blocks if nobody here needs them.
    void close_unused();
  };
  using Copies = std::map<std::string, Copy>;
  // A seal under way. A worker has one of a model on a device at a time.
  struct Sealing {
    std::string process;
    std::string model;
    std::string device;
    // The worker may have written since the seal began.
    bool stale = false;
  };

  // --- KeeperEvents
  void user_gone(const std::string& copy, keeper::UserId user) override;
  void copy_expired(const std::string& copy) override;
  void keeper_lost(const Error& why) override;

  async::Task<void> meet_keeper();
  async::Task<Result<void>> read_keeper();
  void add_kept(const std::string& name, keeper::KeeperLink::Kept kept);
  async::Task<Result<void>> bring_back();
  async::Task<Result<void>> keep_again(std::string name);
  Result<keeper::KeeperLink::Order> order_for(const std::string& name, const Copy& copy,
                                              const User& user) const;
  async::Task<Result<void>> seal_alone(SessionPtr session, proto::SealResident request,
                                       std::vector<UniqueFd> blocks,
                                       std::shared_ptr<Sealing> sealing);
  async::Task<Result<std::string>> wait_for_free(SessionPtr session, ResidentIdentity wanted,
                                                 TimePoint give_up);
  async::Task<Result<Taken>> open(SessionPtr session, std::string name, TimePoint give_up);
  async::Task<Result<OpenResidentPtr>> open_copy(std::string name);
  void came_free(const std::string& name);
  std::shared_ptr<Check> check_of(const std::string& name);
  async::Task<void> run_check(std::string name, std::shared_ptr<Check> check);
  async::Task<Result<void>> verify(std::string name);
  async::Task<Result<std::vector<std::size_t>>> compare_all(std::string name,
                                                            OpenResidentPtr opened);
  async::Task<Result<void>> mend_all(std::string name, OpenResidentPtr opened,
                                     std::vector<std::size_t> tiles,
                                     std::function<bool()> may_write);
  void found_wrong(const std::string& name, const std::vector<std::size_t>& tiles);
  void give_up(const std::string& name, const Error& why);
  async::Task<void> have_mended(std::string name);
  async::Task<Result<void>> keep(SessionPtr session, ResidentIdentity identity,
                                 proto::ResidentRecord record, std::vector<UniqueFd> blocks,
                                 std::shared_ptr<const Sealing> sealing);
  static Result<User> user_of(const Client& client);
  // Why a dead worker may still write to the copy. nullopt: it cannot.
  std::optional<Error> still_open(const Copy& copy) const;
  Copies::iterator find(const ResidentIdentity& identity);
  void lose(const SessionPtr& session, const std::string& name, const Error& why);
  void leave(const std::string& name, keeper::UserId user, const std::string& why);
  async::Task<void> tell_leave(std::string name, keeper::UserId user);
  Error why_none(const ResidentIdentity& wanted) const;
  void drop(std::string name, std::string why);
  async::Task<void> tell_drop(std::string name);
  void note(const Copy& copy, std::string kind, std::string why);

  CopyHost& copies_;
  ResidentBytes bytes_;
  ResidentOwners* owners_ = nullptr;
  EventLog& events_;
  async::TaskGroup& tasks_;
  const boost::asio::any_io_executor executor_;
  const Options options_;
  // By their names at the keeper.
  Copies kept_;
  std::list<std::shared_ptr<Sealing>> sealing_;
  // Copies that the keeper has not been told to drop yet.
  std::set<std::string> dropping_;
  // It asks a keeper for its copies, or brings them to a new one.
  bool recovering_ = false;
  // Keepers that this agent has lost.
  std::uint64_t losses_ = 0;
  bool drained_ = false;
  ResidentTotals totals_;
  keeper::KeeperLink link_;
  // A copy has lost a user, or was dropped.
  async::Notifier changed_;
};

}  // namespace rekindle::worker
