#pragma once

#include <functional>
#include <set>

#include "recovery/coordinator/core/durable_table.h"
#include "recovery/coordinator/core/membership.h"

// The holders of the parts of a joint publication. A node has a part if it holds all of that
// layout, verified, under the root of the version.
namespace rekindle::coordinator {

using MemberFilter = std::function<bool(const Member&)>;

std::set<Digest> parts_of(const Member& member, const ModelVersion& id,
                          const DurableVersion& version);
// The parts that the accepted members have.
std::set<Digest> parts_held(const Membership& members, const ModelVersion& id,
                            const DurableVersion& version, const MemberFilter& accepts);
// False also if the version has no parts.
bool all_parts_held(const Membership& members, const ModelVersion& id,
                    const DurableVersion& version, const MemberFilter& accepts);

}  // namespace rekindle::coordinator
