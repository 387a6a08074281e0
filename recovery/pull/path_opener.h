#pragma once

#include <functional>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "recovery/pull/pull_environment.h"
#include "recovery/pull/pull_policy.h"
#include "recovery/pull/source_table.h"
#include "src/async/task.h"
#include "transport/path.h"

namespace rekindle::pull {

struct TransportChoice {
  // The only transport to use. "": the best one that works.
  std::string forced;
  bool same_host = false;
  // Transports that have worked with this source, and transports that do not.
  std::set<std::string> used;
  std::set<std::string> avoid;
};

// The transports to ask a source for, best first. Transports in `used` are asked for even while
// they cannot work: the pull then tells the user of their loss, and takes them again later.
std::vector<std::string> transports_for(const TransportChoice& choice,
                                        std::span<transport::HandshakeConnector* const> handshakes);

// Connects sources: a session at the source, then paths over the best transport that works. All
// waits are bounded by what is left of the pull's silence. Control thread only.
class PathOpener {
 public:
  struct Options {
    ModelVersion id;
    Digest root;
    std::string forced_transport;
    // Encrypted streams only, and no rails unless the environment trusts all that it has.
    bool encrypted = false;
    // Shows one line to the user.
    std::function<void(std::string)> note;
    // Whether this transport fails for the first time in the pull.
    std::function<bool(const std::string&)> first_failure_of;
    // Called before reads by such a connector land in the destination; again it does nothing.
    std::function<void(transport::HandshakeConnector&)> use_memory;
    // Homes over which no path is made.
    std::vector<std::string> closed_homes = {};
  };
  struct Opened {
    std::vector<transport::RegionKey> regions;
    transport::Paths paths;
  };
  PathOpener(const PullEnvironment& environment, Silence& silence, Options options);

  // These three, in this order, connect a source. The session of an earlier connection in this
  // transfer is given back; a control connection that broke is made anew.
  async::Task<Result<void>> renew(ActiveSource& source);
  // kDenied: the grant has run out. `parent`: the span of the connecting.
  async::Task<Result<void>> open_session(ActiveSource& source, trace::Context parent = {});
  async::Task<Result<Opened>> open_paths(ActiveSource& source);
  // Keeps the control connection of a connected source, and extends its session by its newest
  // grant.
  async::Task<void> keep_alive(const ActiveSource& source) const;

  // What a connected source offers over rails. nullopt: it uses none.
  std::optional<PeerSession::Offer> rail_offer(const ActiveSource& source) const;
  // Paths over the rails that have none. kNotFound: no rail is missing.
  async::Task<Result<transport::Paths>> join_rails(ActiveSource& source, SessionToken token,
                                                   PeerSession::Offer offer,
                                                   std::vector<std::string> in_use);

  bool has_another_transport(const ActiveSource& source) const;
  // Its transport is not used with this source again.
  void give_up_transport(ActiveSource& source, const Error& cause);
  // Ends the sessions of sources that are still of use.
  async::Task<void> close_sessions(SourceTable& sources);

 private:
  std::span<transport::HandshakeConnector* const> handshakes() const;
  transport::Connector* connector(const std::string& transport) const;
  transport::HandshakeConnector* handshake_connector(const std::string& transport) const;
  async::Task<Result<transport::Paths>> open_offer(ActiveSource& source, SessionToken token,
                                                   PeerSession::Offer offer);
  static Opened open_local(ActiveSource& source);
  // The paths, under the cuts of drills.
  transport::Paths guarded(const ActiveSource& source, transport::Paths paths) const;
  void tell_failure(const ActiveSource& source, const std::string& transport, const Error& cause);

  const PullEnvironment& environment_;
  Silence& silence_;
  const Options options_;
};

}  // namespace rekindle::pull
