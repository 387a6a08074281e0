#pragma once

#include <cstddef>
#include <map>
#include <string>

namespace rekindle {

// How many of some places each party has taken.
using PlacesTaken = std::map<std::string, std::size_t>;

// How many of `places` the party may still take. Free ones go to whoever comes first. When all are
// taken, a party with less than an equal part gets the rest of its part all the same, beyond
// `places`, as long as others have more than theirs: nobody can keep it out by never leaving. While
// every party has one place, or there is only one party, this never happens.
std::size_t places_left(std::size_t places, const PlacesTaken& taken, const std::string& party);

}  // namespace rekindle
