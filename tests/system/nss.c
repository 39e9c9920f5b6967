/* A name service below glibc: who uid 4242 is stands in files beside the library; while "down" lies there, it does not answer. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <grp.h>
#include <nss.h>
#include <pwd.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define UID 4242

static int there(const char *name) {
    static char place;
    char path[4096];
    Dl_info found;
    dladdr(&place, &found);
    const char *end = strrchr(found.dli_fname, '/');
    snprintf(path, sizeof path, "%.*s/%s", (int)(end - found.dli_fname), found.dli_fname, name);
    return access(path, F_OK) == 0;
}

static enum nss_status status(const char *name, int known, int *error) {
    char down[64];
    snprintf(down, sizeof down, "%s.down", name);
    *error = there(down) ? ECONNREFUSED : ENOENT;
    return there(down) ? NSS_STATUS_UNAVAIL : known ? NSS_STATUS_SUCCESS : NSS_STATUS_NOTFOUND;
}

enum nss_status _nss_stand_getpwuid_r(uid_t uid, struct passwd *one, char *space, size_t size, int *error) {
    enum nss_status found = status("passwd", uid == UID && !there("deleted"), error);
    if (found != NSS_STATUS_SUCCESS)
        return found;
    if (size < 64) {
        *error = ERANGE;
        return NSS_STATUS_TRYAGAIN;
    }
    strcpy(space, "zoe");
    *one = (struct passwd){space, space + 3, UID, 0, space + 3, space + 3, space + 3};
    return found;
}

enum nss_status _nss_stand_getgrgid_r(gid_t gid, struct group *one, char *space, size_t size, int *error) {
    enum nss_status found = status("group", gid == UID, error);
    if (found != NSS_STATUS_SUCCESS)
        return found;
    if (size < 64) {
        *error = ERANGE;
        return NSS_STATUS_TRYAGAIN;
    }
    strcpy(space, "club");
    char **none = (char **)(space + 8);
    *none = NULL;
    *one = (struct group){space, space + 4, UID, none};
    return found;
}

enum nss_status _nss_stand_initgroups_dyn(const char *name, gid_t first, long *start, long *size, gid_t **groups,
                                          long limit, int *error) {
    enum nss_status found = status("group", strcmp(name, "zoe") == 0, error);
    if (found == NSS_STATUS_SUCCESS && *start < *size)
        (*groups)[(*start)++] = UID;
    return found;
}
