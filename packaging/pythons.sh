# For the builds of packages: the dependency on a Python for which there are libraries. Sourced; needs $pythons, an array.
readarray -t pythons < <(printf '%s\n' "${pythons[@]}" | sort -uV)
lowest=${pythons[0]}

following() { # the version after this one: 3.12 for 3.11
    echo "${1%.*}.$((${1##*.} + 1))"
}

upper=$(following "${pythons[-1]}")

debian_dependency() { # a gap in the list is excluded, too
    printf 'python3 (>= %s), python3 (<< %s~)' "$lowest" "$upper"
    for ((n = 1; n < ${#pythons[@]}; n++)); do
        next=$(following "${pythons[n - 1]}")
        [ "$next" = "${pythons[n]}" ] || printf ', python3 (<< %s~) | python3 (>= %s)' "$next" "${pythons[n]}"
    done
}
