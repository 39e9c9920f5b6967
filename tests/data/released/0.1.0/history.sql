BEGIN TRANSACTION;
CREATE TABLE records (
        seq INTEGER PRIMARY KEY, at REAL NOT NULL, kind TEXT NOT NULL, uid INTEGER, pid INTEGER, fields TEXT NOT NULL
    );
INSERT INTO "records" VALUES(1,1.79572893938899755478e+09,'policy.loaded',NULL,NULL,'{"digest":"adafc7e24f0e","files":["/tmp/mpsbvvixqvse/s/policy.toml"]}');
INSERT INTO "records" VALUES(2,1.79572893966989016525e+09,'action',NULL,NULL,'{"action":"StartControl","reason":"no control daemon is running","rule":"promise 4: a fault, a hang or a crash ends by itself","enforce":true,"threads":10.0,"multiuser":false}');
INSERT INTO "records" VALUES(3,1.79572894001676678656e+09,'action.done',NULL,NULL,'{"action":"StartControl","begun":2,"ok":true,"text":"control daemon 20495 runs (started by this agent)","reason":"no control daemon is running","rule":"promise 4: a fault, a hang or a crash ends by itself","enforce":true,"threads":10.0,"multiuser":false}');
INSERT INTO "records" VALUES(4,1.79572894003943753235e+09,'action',NULL,NULL,'{"action":"Reconcile","reason":"compare its answer with what the agent knows","rule":"promise 4: a fault, a hang or a crash ends by itself","enforce":true,"servers":[]}');
INSERT INTO "records" VALUES(5,1.79572894005928254124e+09,'action.done',NULL,NULL,'{"action":"Reconcile","begun":4,"ok":true,"text":"","reason":"compare its answer with what the agent knows","rule":"promise 4: a fault, a hang or a crash ends by itself","enforce":true,"servers":[]}');
INSERT INTO "records" VALUES(6,1.79572894034439945222e+09,'gate.connected',NULL,20482,'{}');
INSERT INTO "records" VALUES(7,1.79572894035733532898e+09,'action',NULL,NULL,'{"action":"Reconcile","reason":"confirm what a log says: servers of control daemon 20495","rule":"MPS confirms what a log says before mpsagent acts on it","enforce":true,"servers":[]}');
INSERT INTO "records" VALUES(8,1.79572894038850545883e+09,'action.done',NULL,NULL,'{"action":"Reconcile","begun":7,"ok":true,"text":"","reason":"confirm what a log says: servers of control daemon 20495","rule":"MPS confirms what a log says before mpsagent acts on it","enforce":true,"servers":[]}');
INSERT INTO "records" VALUES(9,1.79572894159603619569e+09,'client.waiting',20001,20536,'{"connection":2391619868}');
INSERT INTO "records" VALUES(10,1.79572894159988522529e+09,'turn.began',20001,NULL,'{}');
INSERT INTO "records" VALUES(11,1795728941.619,'server.starting',20001,20537,'{}');
INSERT INTO "records" VALUES(12,1795728941.78,'server.ready',20001,20537,'{}');
INSERT INTO "records" VALUES(13,1.79572894179286265373e+09,'limits.verified',20001,NULL,'{"reason":"server 20537 started with 10 %, 2G","rule":"promise 1: every client gets exactly its policy","enforce":true,"server":20537}');
INSERT INTO "records" VALUES(14,1.7957289417927932739e+09,'client.connected',20001,20536,'{"waited":0.19675707817077637,"limits":{"threads":10.0,"memory":{"0":2147483648}},"fail_safe":false,"handover":0.17559051513671875}');
INSERT INTO "records" VALUES(15,1.7957289432155382633e+09,'client.waiting',20002,20597,'{"connection":2393239370}');
INSERT INTO "records" VALUES(16,1.79572894328843808177e+09,'client.ended',20001,20536,'{"server":20537,"outcome":"ok","seconds":1.4956448078155518,"waited":0.19675707817077637}');
INSERT INTO "records" VALUES(17,1.79572894329455161094e+09,'turn.ended',20001,NULL,'{"seconds":1.6946663856506348,"forced":false}');
INSERT INTO "records" VALUES(18,1.79572894329841923708e+09,'action',NULL,NULL,'{"action":"ShutdownServer","reason":"the last client of server 20537 of user 20001 has gone and user 20002 waits","rule":"promise 2: the GPU is never idle while a user waits","enforce":true,"server":20537,"force":false}');
INSERT INTO "records" VALUES(19,1.79572894330725145342e+09,'client.used',20001,20536,'{"seconds":1.496,"busy":0.0,"energy":148.8,"shared":false,"over":true}');
INSERT INTO "records" VALUES(20,1.79572894332262849811e+09,'action.done',NULL,NULL,'{"action":"ShutdownServer","begun":18,"ok":true,"text":"","reason":"the last client of server 20537 of user 20001 has gone and user 20002 waits","rule":"promise 2: the GPU is never idle while a user waits","enforce":true,"server":20537,"force":false}');
INSERT INTO "records" VALUES(21,1795728943.374,'server.ended',20001,20537,'{"status":0}');
INSERT INTO "records" VALUES(22,1.79572894337521743769e+09,'turn.began',20002,NULL,'{"gap":0.08066582679748535}');
INSERT INTO "records" VALUES(23,1795728943.408,'server.starting',20002,20618,'{}');
INSERT INTO "records" VALUES(24,1795728943.567,'server.ready',20002,20618,'{}');
INSERT INTO "records" VALUES(25,1.79572894357951307292e+09,'limits.verified',20002,NULL,'{"reason":"server 20618 started with 10 %, 2G","rule":"promise 1: every client gets exactly its policy","enforce":true,"server":20618}');
INSERT INTO "records" VALUES(26,1.79572894357945203776e+09,'client.connected',20002,20597,'{"waited":0.36391377449035645,"limits":{"threads":10.0,"memory":{"0":2147483648}},"fail_safe":false,"handover":0.18798303604125977}');
INSERT INTO "records" VALUES(27,1.79572894495269036289e+09,'lease.given',20003,NULL,'{"number":1,"by":0,"until":1821648944.9526904,"job":"job-7"}');
INSERT INTO "records" VALUES(28,1.79572894501280879969e+09,'drain.ordered',NULL,NULL,'{"by":0,"timeout":25920000.0}');
INSERT INTO "records" VALUES(29,1.79572894501298880578e+09,'drain.begun',NULL,NULL,'{"reason":"no new client is let in; clients at work go on for 300d00h","rule":"drain","enforce":true}');
CREATE TABLE sessions (
        number INTEGER PRIMARY KEY, kind TEXT NOT NULL, instance TEXT, uid INTEGER, pid INTEGER NOT NULL,
        came REAL NOT NULL, passed REAL, ended REAL, outcome TEXT, why TEXT, job TEXT, more TEXT NOT NULL
    );
INSERT INTO "sessions" VALUES(9,'client',NULL,20001,20536,1.79572894159603619569e+09,1.7957289417927932739e+09,1.79572894328843808177e+09,'ok',NULL,NULL,'{"limits":{"threads":10.0,"memory":{"0":2147483648}},"memory":144703488,"counted":1.496,"busy":0.0,"energy":148.8,"shared":false}');
INSERT INTO "sessions" VALUES(10,'turn',NULL,20001,0,1.79572894159988522529e+09,1.79572894159988522529e+09,1.79572894329455161094e+09,'left',NULL,NULL,'{"gap":null,"before":null}');
INSERT INTO "sessions" VALUES(15,'client',NULL,20002,20597,1.7957289432155382633e+09,1.79572894357945203776e+09,NULL,NULL,NULL,NULL,'{"limits":{"threads":10.0,"memory":{"0":2147483648}},"memory":144703488}');
INSERT INTO "sessions" VALUES(22,'turn',NULL,20002,0,1.79572894337521743769e+09,1.79572894337521743769e+09,NULL,NULL,NULL,NULL,'{"gap":0.08066582679748535,"before":20001}');
CREATE INDEX records_uid ON records (uid) WHERE uid IS NOT NULL;
CREATE INDEX records_pid ON records (pid) WHERE pid IS NOT NULL;
CREATE INDEX sessions_kind ON sessions (kind, uid, passed, ended);
CREATE INDEX sessions_open ON sessions (number) WHERE ended IS NULL;
COMMIT;
PRAGMA user_version=4;
